"""The tools that find, build and check packages, on tiny repositories that the tests make and break."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tools import check_imports, check_wheels, gpu, structure, wheelhouse
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, Workspace, find_uv


class TestWorkspace:
    def test_siblings_are_found_through_siblings(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("two", dependencies=("composer-one>=0.1,<1", "torch>=2.6"))

        assert tree.workspace.siblings("composer-two") == ["composer-core", "composer-one"]
        assert tree.workspace.closure(["composer-one"]) == ["composer-core", "composer-one"]
        assert tree.workspace.in_order() == ["composer-core", "composer-one", "composer-two"]

    def test_what_only_the_tests_need_counts_on_demand(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        path = tree.add_algorithm("two")
        with (path / "pyproject.toml").open("a") as file:
            file.write('\n[dependency-groups]\ntest = ["composer-one>=0.1", "pillow>=10"]\n')
        workspace = tree.workspace

        assert workspace.siblings("composer-two") == ["composer-core"]
        assert workspace.siblings("composer-two", with_tests=True) == ["composer-core", "composer-one"]
        assert workspace.outside(workspace["composer-two"].test_dependencies) == ["pillow>=10"]

    def test_packages_whose_tests_need_the_same_are_alike(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        path = tree.add_algorithm("two")
        tree.add_algorithm("three", dependencies=("composer-core>=0.1,<1", "pillow>=10"))
        (path / "tests").mkdir()
        (path / "tests" / "test_two.py").write_text("def test_two(): ...\n")

        assert list(tree.workspace.alike().items()) == [
            ("one+1", ["composer-one", "composer-two"]),
            ("core", ["composer-core"]),
            ("three", ["composer-three"]),
        ]

    def test_a_sibling_that_is_not_here_is_never_fetched_from_a_registry(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", dependencies=("composer-elsewhere>=0.1,<1",))

        with pytest.raises(ValueError, match=r"composer-one: .* got 'composer-elsewhere'"):
            tree.workspace.siblings("composer-one")

    def test_an_unknown_name_is_refused(self, tree: Tree) -> None:
        tree.add_core()

        with pytest.raises(ValueError, match=r"got 'composer-none'. Did you mean composer-core\?"):
            tree.workspace["composer-none"]

    def test_what_a_package_must_say_must_be_there(self, tree: Tree) -> None:
        tree.write({"packages/composer-bad/pyproject.toml": '[project]\nname = "composer-bad"\n'})

        with pytest.raises(ValueError, match=r"`project.version` is required, but missing"):
            _ = tree.workspace.packages

    def test_a_change_affects_the_package_and_what_depends_on_it(self, tree: Tree) -> None:
        tree.add_core()
        one = tree.add_algorithm("one")
        tree.add_algorithm("two")
        tree.add_algorithm("three", dependencies=("composer-core>=0.1,<1", "composer-one>=0.1,<1"))
        tree.commit()
        tree.write({"src/composer/more.py": ""}, one)
        tree.commit()

        assert tree.workspace.changed("HEAD~1") == ["composer-one", "composer-three"]

    def test_a_change_to_shared_settings_affects_all(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.commit()
        tree.write({"pyproject.toml": "# changed\n"})
        tree.commit()

        assert tree.workspace.changed("HEAD~1") == ["composer-core", "composer-one"]

    def test_the_table_names_every_package_of_this_repository(self) -> None:
        run = run_tool("workspace")

        assert run.returncode == 0, run.stderr
        assert [line.split()[0] for line in run.stdout.splitlines()] == Workspace().names


class TestWheelhouse:
    def test_a_wheel_is_built_once_for_each_state_of_the_files(self, tree: Tree) -> None:
        core = tree.add_core()
        tree.add_algorithm("one")
        first = wheelhouse.wheels(tree.workspace, ["composer-one"])
        times = [path.stat().st_mtime_ns for path in first]

        tree.write({"tests/test_one.py": "# not in the wheel\n"}, core)
        again = wheelhouse.wheels(tree.workspace, ["composer-one"])
        assert [path.name.split("-")[0] for path in first] == ["composer_core", "composer_one"]
        assert again == first
        assert [path.stat().st_mtime_ns for path in again] == times

        tree.write({"src/composer/core/__init__.py": "TWO = 2\n"}, core)
        changed = wheelhouse.wheels(tree.workspace, ["composer-one"])
        assert changed[0] != first[0]
        assert changed[1] == first[1]

    def test_a_package_that_cannot_be_built_says_why(self, tree: Tree) -> None:
        path = tree.add_core()
        (path / "README.md").unlink()

        with pytest.raises(RuntimeError, match=r"(?s)building composer-core failed:.*README.md"):
            wheelhouse.wheels(tree.workspace, ["composer-core"])

    def test_the_oldest_sibling_is_the_lowest_release_that_the_bounds_allow(self, tree: Tree) -> None:
        core = tree.add_core()
        for version in ("0.1.0", "0.2.0", "0.3.0"):
            text = re.sub(r"(?m)^version = .*$", f'version = "{version}"', (core / "pyproject.toml").read_text())
            tree.write({"pyproject.toml": text}, core)
            tree.commit()
            tree.git("tag", f"composer-core-v{version}")
        tree.add_algorithm("one", dependencies=("composer-core>=0.2,<1",))

        built = wheelhouse.oldest_wheels(tree.workspace, tree.workspace["composer-one"])

        assert [path.name.split("-py3")[0] for path in built] == ["composer_one-0.1.0", "composer_core-0.2.0"]

    def test_a_release_is_read_from_its_tag(self, tree: Tree, tmp_path: Path) -> None:
        core = tree.add_core()
        tree.commit()
        tree.git("tag", "composer-core-v0.1.0")
        tree.git("tag", "composer-core-v0.10.0")
        tree.git("tag", "composer-core-v0.9.0")
        (core / "README.md").unlink()

        assert [str(version) for version in tree.workspace.releases("composer-core")] == ["0.1.0", "0.9.0", "0.10.0"]
        released = tree.workspace.check_out("composer-core", tree.workspace.releases("composer-core")[0], tmp_path)
        assert released.path == tmp_path / "packages" / "composer-core"
        assert (released.path / "README.md").is_file()

    def test_before_its_first_release_the_tree_stands_for_a_sibling(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.commit()

        built = wheelhouse.oldest_wheels(tree.workspace, tree.workspace["composer-one"])

        assert [path.name.split("-py3")[0] for path in built] == ["composer_one-0.1.0", "composer_core-0.1.0"]

    def test_what_comes_from_the_registry_is_read_from_the_wheels(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", dependencies=("composer-core>=0.1,<1", "torch>=2.6", "numpy>=1.24"))

        assert wheelhouse.declared(wheelhouse.wheels(tree.workspace, ["composer-one"])) == ["numpy>=1.24", "torch>=2.6"]


class TestPackagesBuiltFromAll:
    """composer-core and composer-all, whose wheels hold what follows from the other packages."""

    GENERATED = ("composer/core/_catalog.json", "composer/algorithms/__init__.pyi")

    def test_wheels_are_the_same_from_the_repository_and_from_an_sdist(self, tree: Tree) -> None:
        core, umbrella = tree.add_built_from_all()
        tree.add_algorithm("one")
        tree.write({"COMPOSITION.md": "# Which algorithms compose\n"}, umbrella)
        tree.commit()

        for package in (core, umbrella):
            wheel = wheelhouse.build(package, tree.root / "dist" / package.name / "plain", "--wheel")
            through_sdist = wheelhouse.build(package, tree.root / "dist" / package.name / "through")
            assert wheel.read_bytes() == through_sdist.read_bytes()
        check_wheels.check(tree.workspace, tree.root.glob("dist/*/plain/*.whl"))

        (path,) = tree.root.glob("dist/composer-core/plain/*.whl")
        with zipfile.ZipFile(path) as archive:
            assert set(self.GENERATED) <= set(archive.namelist())
            catalog = json.loads(archive.read(self.GENERATED[0]))
        assert catalog["composer.algorithms"] == {"One": "composer-one"}
        (path,) = tree.root.glob("dist/composer-all/plain/*.whl")
        wheel = wheelhouse.Wheel.read(path)
        assert list(map(str, wheel.requirements)) == ["composer-core<1,>=0.1", "composer-one<1,>=0.1"]
        assert str(wheel.metadata.get_payload()).strip().endswith("# Which algorithms compose")
        assert tree.git("status", "--porcelain", "packages") == "", "what is generated must be ignored by git"

    def test_another_package_gives_other_wheels(self, tree: Tree) -> None:
        tree.add_built_from_all()
        tree.add_algorithm("one")
        names = ["composer-core", "composer-all"]
        before = [wheelhouse.fingerprint(tree.workspace[name]) for name in names]
        first, _, _ = wheelhouse.wheels(tree.workspace, names)

        tree.add_algorithm("two")
        again, _, _, _ = wheelhouse.wheels(tree.workspace, names)
        after = [wheelhouse.fingerprint(tree.workspace[name]) for name in names]

        assert first != again
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert [str(one) for one in wheelhouse.Wheel.read(again).requirements][-1] == "composer-two<1,>=0.1"


class TestCheckWheels:
    def problems(self, tree: Tree) -> str:
        """Return the message of `check` about the wheels of a tree, or "" if all are right."""
        built = wheelhouse.wheels(tree.workspace, tree.workspace.names)
        try:
            check_wheels.check(tree.workspace, built)
        except RuntimeError as error:
            return str(error)
        return ""

    def test_good_packages_are_built_from_their_sdists_and_pass(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.write({"dist/stale.whl": ""})

        built = check_wheels.build(tree.workspace, tree.root / "dist")
        check_wheels.check(tree.workspace, built)

        assert [str(path.relative_to(tree.root)) for path in built] == [
            "dist/composer-core/composer_core-0.1.0-py3-none-any.whl",
            "dist/composer-one/composer_one-0.1.0-py3-none-any.whl",
        ]
        assert len(list(tree.root.glob("dist/*/*.tar.gz"))) == 2
        assert not (tree.root / "dist/stale.whl").exists()

    def test_two_owners_of_one_path_are_found(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("two", files={"algorithms/one/__init__.py": "", "algorithms/one/py.typed": ""}, points={})

        assert "`composer/algorithms/one/__init__.py` must have one owner, got `composer-one` and `composer-two`" in (
            self.problems(tree)
        )

    def test_a_shared_init_outside_core_is_found(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", files={"algorithms/__init__.py": "", "algorithms/one.py": "class One: ...\n"})

        assert "`composer/algorithms/__init__.py` belongs to `composer-core` alone" in self.problems(tree)

    def test_two_owners_of_one_command_are_found(self, tree: Tree) -> None:
        tree.add_core()
        for name in ("one", "two"):
            tree.add_algorithm(name, scripts={"train": f"composer.algorithms.{name}:main"})

        assert "`train` of `console_scripts` must have one owner, got `composer-one` and `composer-two`" in (
            self.problems(tree)
        )

    def test_core_is_not_built_while_a_name_has_two_owners(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("two", points={"composer.algorithms": {"One": "composer.algorithms.two:Two"}})

        with pytest.raises(ValueError, match=r"`composer.algorithms.One` .* got 'composer-one' and 'composer-two'"):
            wheelhouse.wheels(tree.workspace, ["composer-core"])

    def test_missing_files_are_found(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", files={"algorithms/one/one.py": "class One: ...\n"})

        problems = self.problems(tree)

        assert "composer-one: `composer/algorithms/one/` must have an `__init__.py`" in problems
        assert "composer-one: `composer/algorithms/one/` must have a `py.typed`" in problems

    def test_files_that_do_not_belong_there_are_found(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.write({"src/composer/algorithms/one/tests/__init__.py": "", "src/other/__init__.py": ""}, path)
        settings = path / "pyproject.toml"
        settings.write_text(settings.read_text().replace('["src/composer"]', '["src/composer", "src/other"]'))

        problems = self.problems(tree)

        assert "a wheel must hold no tests, got `composer/algorithms/one/tests/__init__.py`" in problems
        assert "a wheel must hold nothing beside `composer/`, got `other/__init__.py`" in problems

    @pytest.mark.parametrize(
        ("requirement", "problem"),
        [
            ("composer-core>=0.1", "must be bounded below 1"),
            ("composer-core==0.1.0", "must not be pinned"),
            ("torch>=2.6,<3", "must have no upper bound"),
            ("tqdm", "must have a lower bound"),
        ],
    )
    def test_bounds_that_would_hurt_users_are_found(self, tree: Tree, requirement: str, problem: str) -> None:
        tree.add_core()
        tree.add_algorithm("one", dependencies=(requirement,))

        assert problem in self.problems(tree)

    def test_thin_metadata_is_found(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.write({"README.md": "# short\n"}, path)
        (path / "CHANGELOG.md").unlink()
        settings = path / "pyproject.toml"
        settings.write_text(settings.read_text().replace('"Apache-2.0"', '"MIT"').replace("A package of a test.", ""))
        (path / "LICENSE").unlink()

        problems = self.problems(tree)

        assert "README.md must say what it is" in problems
        assert "CHANGELOG.md must have a section `## 0.1.0 (...)`" in problems
        assert "`License-Expression: Apache-2.0`, got 'MIT'" in problems
        assert "`project.description` must say in one line what it is" in problems
        assert "the wheel must hold the LICENSE" in problems


class TestCheckInstalled:
    def check(self, tree: Tree, command: str) -> subprocess.CompletedProcess[str]:
        """Install a core and a package with a console script, and resolve their entry points."""
        tree.add_core()
        tree.add("composer-plain", {"plain.py": "NUMBER = 1\ndef main(): ...\n"}, scripts={"plain": command})
        site, names = tree.root / "site", ["composer-core", "composer-plain"]
        built = map(str, wheelhouse.wheels(tree.workspace, names))
        install = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *built]
        subprocess.run(install, check=True)
        program = [sys.executable, str(ROOT / "tools" / "check_installed.py"), *names]
        environ = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(program, env=environ, check=False, capture_output=True, text=True)

    def test_entry_points_that_resolve_pass(self, tree: Tree) -> None:
        run = self.check(tree, "composer.plain:main")

        assert (run.returncode, run.stdout) == (0, "composer-core: 0 entry points\ncomposer-plain: 1 entry points\n")

    @pytest.mark.parametrize("command", ["composer.plain:missing", "composer.missing:main", "composer.plain:NUMBER"])
    def test_an_entry_point_that_does_not_resolve_fails(self, tree: Tree, command: str) -> None:
        run = self.check(tree, command)

        assert run.returncode == 1
        assert "composer-plain: " in run.stderr
        assert "`plain`" in run.stderr


class TestCheckImports:
    PROVIDERS: ClassVar = {"torch": ["torch"], "PIL": ["Pillow"], "yaml": ["PyYAML"]}

    @pytest.mark.parametrize(
        ("source", "what"),
        [
            ("import composer.algorithms.one", "`composer.algorithms.one` of `composer-one`"),
            ("from composer.algorithms import One", "`composer.algorithms.One` of `composer-one`"),
            ("def f():\n    import composer.algorithms.one", "`composer.algorithms.one` of `composer-one`"),
            ("from PIL import Image", "`PIL.Image` of `pillow`"),
            ("class A:\n    import yaml", "`yaml` of `pyyaml`"),
        ],
    )
    def test_what_a_module_needs_must_be_declared(self, tree: Tree, source: str, what: str) -> None:
        found = check_imports.undeclared(*self.installed(tree, core=source, one="import torch"), self.PROVIDERS)

        assert found == [
            f"composer-core: `composer.core` imports {what}, which is not declared. Declare it, or remove the import."
        ]

    @pytest.mark.parametrize(
        "source",
        [
            "import os, composer.core",
            "def f():\n    import yaml",
            "try:\n    import yaml\nexcept ImportError:\n    yaml = None",
            "if TYPE_CHECKING:\n    import composer.algorithms.one",
            "import torch",
        ],
    )
    def test_what_is_optional_or_an_exception_need_not_be_declared(self, tree: Tree, source: str) -> None:
        workspace, modules = self.installed(tree, core=source)
        with (workspace["composer-core"].path / "pyproject.toml").open("a") as file:
            file.write('\n[tool.composer.exceptions]\ntorch = "everybody has it"\n')

        assert check_imports.undeclared(tree.workspace, modules, self.PROVIDERS) == []

    @pytest.mark.parametrize(
        ("source", "unused"),
        [
            ("import torch\nfrom PIL import Image", []),
            ("def f():\n    import torch\nif TYPE_CHECKING:\n    import PIL", []),
            ("load('torch.nn')\nload('PIL')", []),
            ("import torch", ["pillow>=10"]),
            ("text = 'see torch for more'", ["torch>=2.6", "pillow>=10"]),
        ],
    )
    def test_what_is_declared_must_be_imported(self, tree: Tree, source: str, unused: list[str]) -> None:
        found = check_imports.unused(*self.installed(tree, core="", one=source), self.PROVIDERS)

        assert [problem.split("`")[1] for problem in found] == unused

    def installed(self, tree: Tree, *, core: str, one: str = "") -> tuple[Workspace, dict[str, check_imports.Module]]:
        """Return packages and their modules: core declares nothing, and one declares core, torch and pillow."""
        tree.add_core()
        tree.add_algorithm("one", dependencies=("composer-core>=0.1,<1", "torch>=2.6", "pillow>=10"))
        modules = {
            "composer.core": check_imports.Module("composer-core", core, is_package=True),
            "composer.algorithms.one": check_imports.Module("composer-one", one),
        }
        return tree.workspace, modules


def test_what_needs_a_gpu_is_run_package_by_package(tmp_path: Path) -> None:
    """Without a GPU, every test with the mark is skipped, with its reason."""
    files = gpu.gpu_tests(Path(gpu.__file__).parent.parent)

    assert "packages/composer-trainer/tests/test_gpu.py" in files["composer-trainer"]
    assert {"tests"} | {path.parent.name for path in Path("packages").glob("*/tests")} >= files.keys()
    result = gpu._test("composer-colout", files["composer-colout"], 300.0, tmp_path, dict(os.environ))
    assert (0, []) == (result["exit"], result["failed"])
    assert result["passed"] if torch.cuda.is_available() else result["skipped"]
    assert "no time left" in gpu._test("composer-colout", files["composer-colout"], 0.0, tmp_path, {})["exit"]


def test_installed_distributions_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
    for name in ("torch-0.1-py3-none-any.whl", "composer_core-0.1-py3-none-any.whl", "not_there-0.1-py3-none-any.whl"):
        (tmp_path / name).touch()

    gpu._install(tmp_path, tmp_path / "site")

    assert ["composer_core-0.1-py3-none-any.whl", "not_there-0.1-py3-none-any.whl"] == [
        Path(part).name for part in commands[0] if part.endswith(".whl")
    ]


def test_a_package_that_grew_since_its_release_is_named_with_its_fragments(tree: Tree) -> None:
    tree.add_core()
    package = tree.add_algorithm("mixup")
    tree.commit()
    tree.git("tag", "composer-mixup-v0.1.0")
    source = package / "src/composer/algorithms/mixup/__init__.py"
    source.write_text(f'{source.read_text()}# A comment, and two lines of code.\n\nONE = 1\nTWO = """\n"""\n')
    tree.write({"changes/7.added.md": "Two constants.\n"}, package)

    lines = list(structure.growth(Workspace(tree.root)))

    assert ["composer-core 1 -", "composer-mixup 4 1"] == [" ".join(line.split()) for line in lines[1:3]]
    assert lines[3:] == [
        "composer-mixup grew by 3 lines since 0.1.0. Say what they buy: packages/composer-mixup/changes/7.added.md"
    ]
