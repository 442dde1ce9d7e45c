"""The tools that read and write text: catalog, stubs, links, examples, style."""

from __future__ import annotations

import json
import sys
import traceback
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tools import (
    check_style,
    derived,
    docstring_blocks,
    link_sources,
    mutants,
    readme_blocks,
    structure,
)
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, Workspace


class TestCatalog:
    def test_it_says_which_package_registers_a_name(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add("composer-plain", {"plain.py": ""}, points={"pytest11": {"plain": "composer.plain"}})

        assert derived.catalog(tree.workspace) == {"composer.algorithms": {"One": "composer-one"}}

    def test_it_says_which_algorithms_are_required_on_load(self, tree: Tree) -> None:
        tree.add_core()
        package = tree.add_algorithm("one")
        method = "    @staticmethod\n    def required_on_load() -> bool:\n        return True\n"
        source = package / "src/composer/algorithms/one/surgery.py"
        source.write_text(f"class Other:\n{method}\n\nclass One:\n{method}", encoding="utf-8")

        assert derived.catalog(tree.workspace)["required_on_load"] == {"One": "composer-one"}

    def test_two_owners_of_one_name_are_refused(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("two", points={"composer.algorithms": {"One": "composer.algorithms.two:Two"}})

        with pytest.raises(ValueError, match=r"`composer.algorithms.One` .* got 'composer-one' and 'composer-two'"):
            derived.catalog(tree.workspace)

    def test_the_installed_one_has_no_wrong_entry(self) -> None:
        installed = files("composer.core").joinpath("_catalog.json").read_text(encoding="utf-8")

        assert json.loads(installed) == derived.catalog(Workspace()), "run `nox -s dev` or `python -m tools.derived`"


class TestLinksAndStubs:
    def test_the_link_farm_holds_all_sources_as_one_package(self, tree: Tree) -> None:
        core = tree.add_core()
        tree.add_algorithm("one")
        farm = tree.root / ".dev" / "src"

        assert link_sources.link(tree.workspace, farm) == 5
        assert (farm / "composer" / "core" / "__init__.py").resolve() == core / "src/composer/core/__init__.py"
        assert (farm / "composer" / "algorithms" / "one" / "__init__.py").is_symlink()

    def test_the_link_farm_refuses_two_owners_of_one_path(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", files={"core/__init__.py": ""})

        with pytest.raises(FileExistsError):
            link_sources.link(tree.workspace, tree.root / "farm")

    def test_stubs_hold_the_names_of_all_packages_and_those_of_core(self, tree: Tree) -> None:
        core = tree.add_core()
        tree.write(
            {
                "src/composer/functional.py": "",
                "src/composer/algorithms/__init__.py": "from composer.core import ONE as ONE\nimport os\n"
                '_OWN = {"utils": "Two"}\n',
            },
            core,
        )
        tree.add_algorithm(
            "one",
            points={
                "composer.algorithms": {"One": "composer.algorithms.one:One"},
                "composer.functional": {"one_batch": "composer.algorithms.one:one_batch", "one": "composer.one.parts"},
            },
        )

        _, first, second = derived.write(tree.workspace["composer-core"])

        assert first == core / "src/composer/algorithms/__init__.pyi"
        assert first.read_text().splitlines()[1:] == [
            "from composer.algorithms.one import One as One",
            "from composer.algorithms.utils import Two as Two",
            "from composer.core import ONE as ONE",
            *("", "__all__ = [", '    "ONE",', '    "One",', '    "Two",', "]"),
        ]
        assert second == core / "src/composer/functional.pyi"
        assert second.read_text().splitlines()[1:] == [
            "from composer.algorithms.one import one_batch as one_batch",
            "from composer.one import parts as one",
            *("", "__all__ = [", '    "one",', '    "one_batch",', "]"),
        ]


README = """\
# Title

```python
x = 20
```

Text.

```bash
nox -s tests -- -x
pip install "composer-one>=0.1" && one-train
```

```python
y = x + 1
assert y == 21
```
"""


class TestMutants:
    SOURCE = 'def f(a, b):\n    """Compare."""\n    if a < b:\n        g()\n    raise ValueError("a" if a else "b")\n'

    def test_conditions_bounds_and_statements_change_but_not_docstrings_and_errors(self) -> None:
        found = [(line, change) for _, line, change in mutants.sites(self.SOURCE)]

        assert sorted(found) == [(3, "move the bound"), (3, "negate the condition"), (4, "drop the statement")]

    def test_each_mutant_is_one_change(self) -> None:
        changed = {change: mutants.mutate(self.SOURCE, node, change) for node, _, change in mutants.sites(self.SOURCE)}

        assert "if not a < b:\n        g()" in changed["negate the condition"]
        assert "if a <= b:\n        g()" in changed["move the bound"]
        assert "if a < b:\n        pass" in changed["drop the statement"]


class TestStructure:
    def test_docstrings_comments_and_blank_lines_are_no_code(self) -> None:
        source = '"""Module."""\n\n# why\ndef f():\n    """Doc.\n\n    More.\n    """\n    return """a\nb"""  # text\n'

        assert structure.code_lines(source) == 3

    def test_it_counts_files_and_functions_once(self) -> None:
        functions: dict[str, Any] = {}
        code = "def first(): pass\ndef second(): pass\n"
        exec(compile(code, "/repository/packages/composer-x/src/composer/x/y.py", "exec"), functions)  # noqa: S102

        entered = structure.Entered()
        entered.during(lambda: [functions["first"](), functions["first"](), functions["second"](), len([])])

        file = "composer-x/src/composer/x/y.py"
        assert list(entered.functions) == [(file, "first"), (file, "second")]


class TestReadmeBlocks:
    def test_the_program_keeps_the_line_numbers_of_the_text(self) -> None:
        program = readme_blocks.script(README).splitlines()

        assert {number: line for number, line in enumerate(program, start=1) if line} == {
            4: "x = 20",
            15: "y = x + 1",
            16: "assert y == 21",
        }

    def test_each_block_sees_those_before_it(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text(README)

        assert run_tool("readme_blocks", str(tmp_path / "README.md")).returncode == 0

    def test_an_error_points_at_the_line_of_the_text(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text(README.replace("y == 21", "y == 22"))

        run = run_tool("readme_blocks", str(tmp_path / "README.md"))

        assert run.returncode == 1
        assert 'README.md", line 16' in run.stderr
        assert "AssertionError" in run.stderr

    def test_commands_that_exist_pass(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", scripts={"one-train": "composer.algorithms.one:One"})

        assert list(readme_blocks.command_problems(README, tree.workspace, {"tests"})) == []

    def test_commands_that_do_not_exist_are_found(self, tree: Tree) -> None:
        tree.add_core()

        assert list(readme_blocks.command_problems(README, tree.workspace, {"lint"})) == [
            "line 10: no nox session named ['tests']",
            "line 11: no package named ['composer-one']",
            "line 11: no command named 'one-train'",
        ]

    def test_examples_import_what_the_text_installs(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("two")
        example = "```python\nfrom composer.algorithms.{0} import {0}\n```\n"
        text = example.format("one") + "```bash\npip install 'composer-two>=0.1'\n```\n" + example.format("two")

        assert list(readme_blocks.install_problems(text, tree.workspace, "composer-one")) == []
        assert list(readme_blocks.install_problems(text, tree.workspace, None)) == [
            "line 2: `composer.algorithms.one.one` needs ['composer-one'], which no `pip install` above names"
        ]

    def test_modules_that_are_run_exist(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        text = "```bash\npython -m composer.algorithms.one\npython -m composer.algorithms.two\n```\n"
        (tree.workspace["composer-one"].source / "composer/algorithms/one/__main__.py").touch()

        assert list(readme_blocks.command_problems(text, tree.workspace, set())) == [
            "line 3: no module named 'composer.algorithms.two'"
        ]


class TestDocstringBlocks:
    SOURCE = '''"""A module.

These are files::

    model.pt
    optim/optim.pt    or shards
"""

FACTOR = 2


def double(x):
    """Return twice a number.

    Example:
        Of three::

            y = double(3)


            def test_it_is_six():
                assert y == 3 * FACTOR

        And of the net::

            double(y)
            next(net.parameters())
    """
    return FACTOR * x
'''

    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(tmp_path / "src")
        monkeypatch.chdir(ROOT)
        monkeypatch.delitem(sys.modules, "a_module", raising=False)
        (tmp_path / "src").mkdir()
        return tmp_path / "src" / "a_module.py"

    def test_a_docstring_is_one_program_with_the_line_numbers_of_the_file(self) -> None:
        (program,) = docstring_blocks.programs(self.SOURCE)

        lines = self.SOURCE.splitlines()
        assert {number: line for number, line in enumerate(program.splitlines(), start=1) if line} == {
            number: lines[number - 1][12:] for number in (18, 21, 22, 26, 27)
        }

    def test_blocks_use_names_of_the_module_and_of_a_training_loop(self, module: Path) -> None:
        module.write_text(self.SOURCE)

        docstring_blocks.run(module)

    @pytest.mark.parametrize(
        ("right", "wrong", "error"),
        [
            ("double(y)", "triple(y)", NameError),
            ("y = double(3)", "y = double(3", SyntaxError),
            ("3 * FACTOR", "4 * FACTOR", AssertionError),
        ],
    )
    def test_a_wrong_block_is_an_error_at_its_line(
        self, module: Path, right: str, wrong: str, error: type[Exception]
    ) -> None:
        module.write_text(self.SOURCE.replace(right, wrong))

        with pytest.raises(error) as raised:
            docstring_blocks.run(module)

        line = 1 + next(i for i, text in enumerate(module.read_text().splitlines()) if wrong in text)
        shown = "".join(traceback.format_exception(raised.value))
        assert f'a_module.py", line {line}' in shown

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("f(x)", True),
            ("x = 1\ny = (", True),
            ("from x import y\nwhile y", True),
            ("[metric][batch=1]: loss/train/total: 0.6931\n[stdout]: what the process printed", False),
            ("model/model.pt    or shards\nresumption.pkl", False),
            ('{"model": {"content": {...}, "class": ...},\n "tokenizer": {"a": {...}, ...}}', False),
        ],
    )
    def test_python_is_told_apart_from_other_text(self, code: str, expected: bool) -> None:
        assert docstring_blocks.is_python(code) is expected

    def test_the_site_shows_literal_blocks_as_fenced_ones(self) -> None:
        text = "A.\n\nExample:\n    One::\n\n        x = 1\n\n\n        y = 2\n\n    ::\n\n        a  b\n\nSource: C."

        assert docstring_blocks.fenced(text) == (
            "A.\n\nExample:\n    One:\n\n    ```python\n    x = 1\n\n\n    y = 2\n    ```\n\n"
            "    ```text\n    a  b\n    ```\n\nSource: C."
        )
        assert docstring_blocks.fenced("A `::` and an end::\n\nnext") == "A `::` and an end::\n\nnext"


class TestStyle:
    def test_letters_outside_ascii_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "good.py").write_text("x = 1\n")
        (tmp_path / "letters.md").write_text("one\nd\u00e9j\u00e0\n", encoding="utf-8")

        assert list(check_style.problems(tmp_path, ["good.py", "letters.md"])) == [
            "letters.md:2: text must be ASCII, got '\\xe9'. Replace it by ASCII characters.",
        ]

    def test_docstrings_that_begin_as_fragments_are_reported(self, tmp_path: Path) -> None:
        text = '"""Good."""\n\n\ndef f():\n    """What it does."""\n\n\nclass C:\n    """Whatever."""\n'
        paths = ["packages/composer-one/src/composer/one.py", "packages/composer-one/tests/test_one.py", "tools/two.py"]
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

        assert list(check_style.docstring_problems(tmp_path, paths)) == [
            f"{path}:5: a docstring must not begin with 'What'. "
            "Begin with a verb such as `Return`; for a class, module or property, with a noun."
            for path in paths
        ]
