"""Tests of what registries show beside a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import metadata, new_package, wheelhouse
from tools.tiny_tree import Tree, run_tool
from tools.workspace import tomllib

BEFORE = ('pythons = ["3.10", "3.11", "3.12", "3.13"]', '# repository = "https://..."')


def project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def set_up(tree: Tree, old: str, new: str) -> None:
    settings = (tree.root / "pyproject.toml").read_text(encoding="utf-8")
    assert old in settings
    tree.write({"pyproject.toml": settings.replace(old, new)})


def test_fields_are_added_to_what_is_there_and_stay_the_same(tree: Tree) -> None:
    tree.add_core()
    path = tree.add_algorithm("one")
    before = project(path)

    assert metadata.write(tree.workspace, tree.workspace["composer-one"])
    written = (path / "pyproject.toml").read_text(encoding="utf-8")
    assert not metadata.write(tree.workspace, tree.workspace["composer-one"])

    assert (path / "pyproject.toml").read_text(encoding="utf-8") == written
    after = project(path)
    assert before.items() <= after.items()
    assert after["authors"] == [{"name": "The Composer authors"}]
    assert after["keywords"] == [
        "deep-learning", "machine-learning", "one", "pytorch", "training", "training-method",
    ]  # fmt: skip
    assert "urls" not in after


def test_classifiers_follow_from_the_pythons_and_the_sources(tree: Tree) -> None:
    tree.add_core()
    tree.add_built_from_all()
    path = tree.add_algorithm("one")
    text = (path / "pyproject.toml").read_text(encoding="utf-8")
    tree.write({"pyproject.toml": text.replace(">=3.10", ">=3.12")}, path)

    one = metadata.classifiers(tree.workspace["composer-one"], ["3.9", "3.10", "3.12", "3.13"])
    umbrella = metadata.classifiers(tree.workspace["composer-all"], ["3.9", "3.10"])

    assert [line.rpartition(":: ")[2] for line in one if "Python :: 3." in line] == ["3.12", "3.13"]
    assert "Typing :: Typed" in one
    assert [line.rpartition(":: ")[2] for line in umbrella if "Python :: 3." in line] == ["3.10"]
    assert "Typing :: Typed" not in umbrella


def test_links_follow_from_the_address_of_the_repository(tree: Tree) -> None:
    tree.add_core()
    path = tree.add_algorithm("one", scripts={"one": "composer.algorithms.one:One"})
    set_up(tree, BEFORE[1], 'repository = "https://example.org/us/composer/"')

    for _ in range(2):
        metadata.write(tree.workspace, tree.workspace["composer-one"])

    links = project(path)["urls"]
    assert links["Homepage"] == "https://example.org/us/composer"
    assert links["Changelog"] == "https://example.org/us/composer/blob/main/packages/composer-one/CHANGELOG.md"
    assert (path / "pyproject.toml").read_text(encoding="utf-8").count("[project.urls]") == 1


def test_a_wheel_carries_them(tree: Tree) -> None:
    tree.add_core()
    tree.add_algorithm("one")
    set_up(tree, BEFORE[1], 'repository = "https://example.org/us/composer"')
    metadata.write(tree.workspace, tree.workspace["composer-one"])

    about = wheelhouse.Wheel.read(wheelhouse.wheels(tree.workspace, ["composer-one"])[1]).metadata

    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert about["Keywords"].split(",")[2] == "one"
    assert about["Author"] == "The Composer authors"
    assert "Issues, https://example.org/us/composer/issues" in about.get_all("Project-URL", [])


def test_what_is_out_of_date_is_named_and_written_again(tree: Tree) -> None:
    tree.add_core()
    path = tree.add_algorithm("one")
    for name in tree.workspace.names:
        metadata.write(tree.workspace, tree.workspace[name])
    assert run_tool("metadata", "--check", cwd=tree.root).returncode == 0
    text = (path / "pyproject.toml").read_text(encoding="utf-8")
    changed = text.replace('"Typing :: Typed"', '"Typing :: Stubs Only"').replace('"one"', '"mine"')
    tree.write({"pyproject.toml": changed}, path)

    check = run_tool("metadata", "--check", cwd=tree.root)
    assert check.returncode == 1
    assert check.stderr.strip() == (
        "packages/composer-one/pyproject.toml: `keywords`, `classifiers` must follow from the package."
        " Run `nox -s fix`."
    )
    assert run_tool("metadata", cwd=tree.root).stdout.startswith("written: composer-one\n")
    assert run_tool("metadata", "--check", cwd=tree.root).returncode == 0
    assert {"mine", "one"} <= set(project(path)["keywords"])


def test_a_setting_that_is_missing_is_named(tree: Tree) -> None:
    tree.add_core()
    set_up(tree, BEFORE[0], "")

    with pytest.raises(ValueError, match=r"`tool.composer.pythons` is required, but missing"):
        metadata.write(tree.workspace, tree.workspace["composer-core"])


def test_a_new_package_has_them(tree: Tree) -> None:
    tree.add_core()

    path = new_package.make(tree.workspace, "composer-foo", "Foo")

    assert "Typing :: Typed" in project(path)["classifiers"]
    assert list(metadata.problems(tree.workspace)) == [
        "packages/composer-core/pyproject.toml: `authors`, `keywords`, `classifiers` must follow from the package."
        " Run `nox -s fix`."
    ]
