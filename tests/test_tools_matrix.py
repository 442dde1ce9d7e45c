"""The plan of CI, and released packages on the working tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tools import compatibility, environment, matrix, wheelhouse
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, Workspace, find_uv


def entry(name: str, what: str | None = None, python: str | None = None) -> dict[str, Any]:
    """One entry of `nox --list --json`, for a package, a group of packages or everything."""
    session = name if python is None else f"{name}-{python}"
    key = "alike" if name in ("pythons", "newest", "nightly") else "package"
    return {
        "name": name,
        "session": session if what is None else f"{session}({what})",
        "python": python,
        "call_spec": {} if what is None else {key: what},
    }


@pytest.fixture
def workspace(tree: Tree) -> Workspace:
    tree.add_core()
    for name in ("one", "two", "three"):
        tree.add_algorithm(name)
    tree.add_algorithm("top", dependencies=("composer-core>=0.1,<1", "composer-one>=0.1,<1"))
    tree.write({"tests/test_one.py": f"# {'mark'}.gpu\n"}, tree.workspace["composer-one"].path)
    tree.commit()
    return tree.workspace


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    names, groups = workspace.names, workspace.alike()
    return [
        *(entry("pythons", group, python) for python in ("3.11", "3.12", "3.14") for group in groups),
        *(entry(kind, group) for kind in ("newest", "nightly") for group in groups),
        *(entry(kind, name) for kind in ("oldest", "regress") for name in names),
        *(entry("gpu", name) for name in (*names, "all")),
        entry("lint"),
    ]


class TestPlan:
    def test_columns_say_python_torch_and_device(self, workspace: Workspace) -> None:
        columns = matrix.plan(workspace, listing(workspace))

        assert [(column.name, column.python, column.torch, column.device) for column in columns] == [
            ("pythons-3.12", "3.12", "pinned", "cpu"),
            ("newest", "3.14", "newest", "cpu"),
            ("nightly", "3.12", "nightly", "cpu"),
            ("oldest", "3.11", "oldest", "cpu"),
            ("regress", "3.12", "pinned", "cpu"),
            ("gpu", "3.12", "pinned", "cuda"),
            ("checks", "3.12", "pinned", "cpu"),
        ]
        assert columns[-2].sessions == ("gpu(all)",)
        assert set(columns[-3].sessions) == {f"regress(composer-{name})" for name in ("one", "two", "three", "top")}

    def test_only_affected_packages_are_tested(self, workspace: Workspace) -> None:
        columns = matrix.plan(workspace, listing(workspace), ["composer-one"])

        assert {column.name: column.sessions for column in columns} == {
            "pythons-3.12": ("pythons-3.12(one+2)", "pythons-3.12(top)"),
            "newest": ("newest(one+2)", "newest(top)"),
            "nightly": ("nightly(one+2)", "nightly(top)"),
            "oldest": ("oldest(composer-one)", "oldest(composer-top)"),
            "regress": ("regress(composer-top)",),
            "gpu": ("gpu(composer-one)",),
            "checks": ("lint",),
        }

    @pytest.mark.parametrize(
        ("changed", "tested"),
        [("core", ["one", "three", "top", "two"]), ("one", ["top"]), ("top", []), ("two", ["three"])],
    )
    def test_a_changed_package_meets_the_releases_of_its_dependants(
        self, workspace: Workspace, changed: str, tested: list[str]
    ) -> None:
        with (workspace["composer-three"].path / "pyproject.toml").open("a") as file:
            file.write('\n[dependency-groups]\ntest = ["composer-two>=0.1,<1"]\n')
        workspace = Workspace(workspace.root)
        sessions = [entry("regress", name) for name in workspace.names]

        columns = matrix.plan(workspace, sessions, [f"composer-{changed}"])

        assert [session for column in columns for session in column.sessions] == [
            f"regress(composer-{name})" for name in tested
        ]

    def test_sessions_are_spread_over_columns_by_their_numbers_of_tests(self, workspace: Workspace, tree: Tree) -> None:
        sessions = [entry("oldest", name) for name in workspace.names]
        (before,) = matrix.plan(workspace, sessions)
        for name in ("one", "two"):
            lines = "".join(f"def test_{number}(): ...\n" for number in range(3000))
            tree.write({"tests/test_many.py": lines}, workspace[f"composer-{name}"].path)

        columns = matrix.plan(workspace, sessions)

        assert [column.name for column in columns] == ["oldest 1", "oldest 2"]
        assert max(column.seconds for column in columns) <= matrix.LIMIT
        assert [session for column in columns for session in column.sessions] == list(before.sessions)
        lines = [line.split() for line in matrix.text(columns).splitlines() if " 3.11 " in line]
        assert lines[0] == ["oldest", "1", "3.11", "oldest", "cpu", "15", "4"]
        assert lines[1] == ["oldest", "2", "3.11", "oldest", "cpu", "14", "1"]

    def test_the_workflow_gets_three_matrices(self, workspace: Workspace) -> None:
        outputs = matrix.workflow(matrix.plan(workspace, listing(workspace))).splitlines()

        jobs = {name: json.loads(text)["include"] for name, _, text in (line.partition("=") for line in outputs)}
        assert list(jobs) == ["cpu", "nightly", "cuda"]
        assert [one["column"] for one in jobs["nightly"]] == ["nightly"]
        assert jobs["cuda"] == [{"column": "gpu", "python": "3.12", "torch": "pinned", "sessions": "gpu(all)"}]
        (oldest,) = [one for one in jobs["cpu"] if one["column"] == "oldest"]
        assert oldest["sessions"].split("\n") == [f"oldest({name})" for name in workspace.names]

    def test_a_file_that_moved_away_and_one_that_is_not_committed_count(self, workspace: Workspace, tree: Tree) -> None:
        tree.git("mv", "packages/composer-one/tests/test_one.py", "packages/composer-two/test_moved.py")
        tree.git("commit", "--quiet", "--message", "move")
        tree.write({"packages/composer-three/src/x.py": ""}, tree.root)

        assert set(workspace.touched("HEAD^")) == {"composer-one", "composer-two", "composer-three"}

    def test_documents_and_the_site_touch_no_package(self, workspace: Workspace, tree: Tree) -> None:
        tree.write(
            {"packages/composer-one/README.md": "x", "tools/site/guides/start.md": "x", "README.md": "x"}, tree.root
        )
        assert workspace.touched("HEAD") == []
        tree.write({"tools/other.py": ""}, tree.root)
        assert workspace.touched("HEAD") == workspace.names

    def test_actions_of_others_are_pinned_by_their_digests(self) -> None:
        files = [*(ROOT / ".github").rglob("*.yml")]
        used = [line for file in files for line in file.read_text().splitlines() if re.search(r"\buses: (?!\./)", line)]

        assert used
        assert [line for line in used if not re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []

    def test_an_unknown_commit_is_an_error(self, workspace: Workspace) -> None:
        with pytest.raises(ValueError, match=r"must be a commit of this repository, got 'origin/none'"):
            workspace.touched("origin/none")


def test_the_page_of_compatibility_has_releases_which_are_tags_and_what_is_tested(tree: Tree) -> None:
    tree.add_core()
    for name in ("one", "two"):
        tree.add_algorithm(name)
    tree.commit()
    for tag in ("composer-one-v0.1.0", "composer-one-v0.2.0", "composer-one-v0.10.0rc1", "composer-two-v1"):
        tree.git("tag", tag)

    page = compatibility.compatibility(tree.workspace)

    assert "| composer-one | 0.1.0 | 0.10.0rc1, 0.2.0, 0.1.0 | >=3.11 |" in page
    assert "| composer-two | 0.1.0 | not released yet | >=3.11 |" in page
    assert all(python in page for python in tree.workspace.settings["pythons"])


class TestRegress:
    """The latest release of a package, with its own tests, on siblings of the working tree."""

    def run(self, tree: Tree, name: str) -> subprocess.CompletedProcess[str]:
        released, wheels = wheelhouse.released_wheels(tree.workspace, name, tree.root / "released")
        site = tree.root / "site"
        install = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *map(str, wheels)]
        subprocess.run(install, check=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        environ = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            [*command, str(released.tests)], cwd=tree.root, env=environ, check=False, capture_output=True, text=True
        )

    @pytest.fixture
    def released(self, tree: Tree) -> Tree:
        """A tree in which core and an algorithm have releases, and the algorithm changed afterwards."""
        tree.add_core()
        one = tree.add_algorithm("one", files={
            "algorithms/one/__init__.py": "from composer.core import ONE\nclass One: value = ONE\n",
            "algorithms/one/py.typed": "",
        })  # fmt: skip
        test = "from composer.algorithms.one import One\ndef test_one(): assert One.value == 1\n"
        tree.write({"tests/test_one.py": test}, one)
        tree.commit()
        for name in ("core", "one"):
            tree.git("tag", f"composer-{name}-v0.1.0")
        tree.write({"tests/test_one.py": "def test_of_the_tree(): raise AssertionError\n"}, one)
        tree.commit()
        return tree

    def test_a_change_of_core_that_released_packages_bear_passes(self, released: Tree) -> None:
        tree = released
        tree.write({"src/composer/core/__init__.py": "ONE = 1\nTWO = 2\n"}, tree.workspace["composer-core"].path)

        run = self.run(tree, "composer-one")

        assert run.returncode == 0, run.stdout + run.stderr
        assert "1 passed" in run.stdout

    def test_a_change_of_core_that_breaks_released_packages_fails(self, released: Tree) -> None:
        tree = released
        tree.write({"src/composer/core/__init__.py": "UNO = 1\n"}, tree.workspace["composer-core"].path)

        run = self.run(tree, "composer-one")

        assert run.returncode != 0
        assert "cannot import name 'ONE'" in run.stdout

    def test_a_core_that_released_packages_exclude_is_named(self, released: Tree) -> None:
        tree = released
        one, _ = wheelhouse.released_wheels(tree.workspace, "composer-one", tree.root / "released")
        assert wheelhouse.kept_out(tree.workspace, one) == []
        project = tree.workspace["composer-core"].path / "pyproject.toml"
        project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "1.0.0"'))

        (found,) = wheelhouse.kept_out(tree.workspace, one)

        assert found.startswith("composer-core 1.0.0 (it needs ")

    def test_the_newest_algorithm_meets_the_oldest_core_that_it_allows(self, released: Tree) -> None:
        tree = released
        core = tree.workspace["composer-core"]
        tree.write({"src/composer/core/__init__.py": "ONE = 1\nTWO = 2\n"}, core.path)

        wheels = wheelhouse.oldest_wheels(tree.workspace, tree.workspace["composer-one"])

        site = tree.root / "oldest"
        install = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *map(str, wheels)]
        subprocess.run(install, check=True)
        assert (site / "composer/core/__init__.py").read_text() == "ONE = 1\n"

    def test_a_released_package_is_not_installed_twice(self, tree: Tree) -> None:
        """Its tests may need a package that needs it."""
        core = tree.add_core()
        tree.add_algorithm("one")
        with (core / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write('\n[dependency-groups]\ntest = ["composer-one>=0.1,<1"]\n')
        tree.commit()
        tree.git("tag", "composer-core-v0.1.0")
        tree.write({"src/composer/core/__init__.py": "ONE = 2\n"}, core)

        _, wheels = wheelhouse.released_wheels(tree.workspace, "composer-core", tree.root / "released")

        assert [path.name.split("-")[0] for path in wheels] == ["composer_core", "composer_one"]


def test_what_answers_nothing_is_not_reached() -> None:
    assert not environment.reaches("http://127.0.0.1:9/torch/")


def test_the_plan_of_this_repository_keeps_the_limit() -> None:
    pytest.importorskip("nox", reason="the sessions are listed by nox")

    run = run_tool("matrix", "--plan")

    assert run.returncode == 0, run.stderr
    columns = [line for line in run.stdout.splitlines()[1:] if line[17:18] == "3"]
    assert {line[17:].split()[1] for line in columns} == {"oldest", "pinned", "newest", "nightly"}
    assert max(float(line[17:].split()[3]) for line in columns) <= matrix.LIMIT / 60
    assert float(run.stdout.splitlines()[-1].split()[2]) <= 250


def test_people_see_the_usual_sessions_and_all_on_demand() -> None:
    pytest.importorskip("nox", reason="the sessions are listed by nox")
    listed, described, known = (
        subprocess.run(
            [sys.executable, "-m", "nox", *more], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for more in (["--list"], ["-s", "help"], ["--list", "--json", "--tags", "ci"])
    )

    assert listed.count(" -> ") == 10
    assert {one["name"] for one in json.loads(known)} < {line.split()[0] for line in described.splitlines()}
