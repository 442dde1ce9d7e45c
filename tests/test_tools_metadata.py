"""Tests of what registries show beside a package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import metadata, wheelhouse
from tools.tiny_tree import Tree
from tools.workspace import ROOT, Package, Workspace

UNSET = '# repository = "https://..."'
ADDRESS = "https://example.org/us/composer"
TARGET = re.compile(r"""\]\(([^)\s]+)|(?:src|srcset|href)=["']([^"'\s]+)""")  # also of HTML


def described(package: Package) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(metadata.described(package))["project"]
    return table


def set_up(root: Path, old: str, new: str) -> None:
    path = root / "pyproject.toml"
    settings = path.read_text(encoding="utf-8")
    assert old in settings
    path.write_text(settings.replace(old, new), encoding="utf-8")


def addresses(package: Package, page: str) -> list[str]:
    """Return the addresses on a page, and check that those of the repository lead to files of the right kind."""
    targets = [match[1] or match[2] for match in TARGET.finditer(re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]+`", "", page))]
    for target in targets:
        assert target.startswith(("https://", "http://", "#")), f"{package.name}: {target}"
        if target.startswith(ADDRESS):
            kind, tag, place = target.removeprefix(f"{ADDRESS}/").partition("#")[0].split("/", 2)
            assert (ROOT / place).is_dir() if kind == "tree" else (ROOT / place).is_file(), target
            assert kind == "raw" or Path(place).suffix not in (".png", ".svg")
            assert tag == f"{package.name}-v{package.version}"
    return targets


def test_fields_are_added_to_what_is_there(tree: Tree) -> None:
    tree.add_core()
    package = Package.read(tree.add_algorithm("one"))
    before = tomllib.loads((package.path / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    after = described(package)

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
    tree.write({"pyproject.toml": text.replace(">=3.11", ">=3.12")}, path)

    one = metadata.classifiers(tree.workspace["composer-one"], ["3.9", "3.11", "3.12", "3.13"])
    umbrella = metadata.classifiers(tree.workspace["composer-all"], ["3.9", "3.11"])

    assert [line.rpartition(":: ")[2] for line in one if "Python :: 3." in line] == ["3.12", "3.13"]
    assert "Typing :: Typed" in one
    assert [line.rpartition(":: ")[2] for line in umbrella if "Python :: 3." in line] == ["3.11"]
    assert "Typing :: Typed" not in umbrella


def test_links_follow_from_the_address_of_the_repository(tree: Tree) -> None:
    tree.add_core()
    path = tree.add_algorithm("one", scripts={"one": "composer.algorithms.one:One"})
    set_up(tree.root, UNSET, f'repository = "{ADDRESS}"')

    links = described(Package.read(path))["urls"]

    assert links["Homepage"] == ADDRESS
    assert links["Changelog"] == f"{ADDRESS}/blob/main/packages/composer-one/CHANGELOG.md"


def test_a_wheel_and_its_sdist_carry_them_and_the_sources_stay(tree: Tree, tmp_path: Path) -> None:
    tree.add_core()
    path = tree.add_algorithm("one")
    text = f"# One\n\n[Core](../composer-core#events), `[a](b)`.\n\n![A picture](one.svg)\n\n{'What it is. ' * 20}\n"
    tree.write({"README.md": text, "one.svg": "<svg/>"}, path)
    set_up(tree.root, UNSET, f'repository = "{ADDRESS}"')
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    wheel = wheelhouse.build(path, tmp_path / "dist")
    about = wheelhouse.Wheel.read(wheel).metadata

    assert [file.name for file in wheel.parent.glob("*.tar.gz")] == ["composer_one-0.1.0.tar.gz"]
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert about["Keywords"].split(",")[2] == "one"
    assert about["Author"] == "The Composer authors"
    assert f"Issues, {ADDRESS}/issues" in about.get_all("Project-URL", [])
    assert f"[Core]({ADDRESS}/tree/composer-one-v0.1.0/packages/composer-core#events), `[a](b)`." in str(about)
    assert f"![A picture]({ADDRESS}/raw/composer-one-v0.1.0/packages/composer-one/one.svg)" in str(about)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_wheel_is_built_again_when_the_address_changes(tree: Tree) -> None:
    tree.add_core()
    (before,) = wheelhouse.wheels(tree.workspace, ["composer-core"])
    set_up(tree.root, UNSET, f'repository = "{ADDRESS}"')

    assert wheelhouse.wheels(tree.workspace, ["composer-core"]) != [before]


@pytest.mark.parametrize("name", Workspace().names)
def test_every_link_and_picture_of_a_page_leads_somewhere_on_a_registry(name: str) -> None:
    package = Workspace()[name]
    text = (package.path / "README.md").read_text(encoding="utf-8")

    before, after = text.count("]("), addresses(package, metadata.page(package, text, ADDRESS))

    assert len(after) <= before


@pytest.mark.parametrize("name", ["composer-mixup", "composer-core", "composer-all"])
def test_the_page_of_a_wheel_has_no_relative_link(name: str, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    (root / "packages").mkdir(parents=True)
    for path in (ROOT / ".gitignore", ROOT / "tools", *(ROOT / "packages").iterdir()):
        (root / path.relative_to(ROOT)).symlink_to(path)
    (root / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    set_up(root, UNSET, f'repository = "{ADDRESS}"')
    package = Workspace(root)[name]

    about = wheelhouse.Wheel.read(wheelhouse.build(package.path, tmp_path / "dist")).metadata

    found = addresses(package, str(about.get_payload()))
    assert any(target.startswith(ADDRESS) for target in found) == (name != "composer-all")
    assert f"Homepage, {ADDRESS}" in about.get_all("Project-URL", [])


def test_a_link_of_a_readme_to_no_file_ends_the_build(tree: Tree) -> None:
    path = tree.add_core()
    tree.write({"README.md": "# Core\n\n[Hosts](HOSTS.md)\n"}, path)

    with pytest.raises(ValueError, match=r"composer-core: the link of the README to 'HOSTS.md' leads to no file"):
        metadata.page(tree.workspace["composer-core"], (path / "README.md").read_text(encoding="utf-8"), ADDRESS)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pythons = ", "others = ", "`tool.composer.pythons` is required, but missing"),
        (UNSET, f'repository = "{ADDRESS}/"', "`tool.composer.repository` must be an address such as"),
        (UNSET, 'repository = "us/composer"', "got 'us/composer'"),
    ],
)
def test_a_setting_that_is_missing_or_wrong_is_named(tree: Tree, old: str, new: str, message: str) -> None:
    package = Package.read(tree.add_core())
    set_up(tree.root, old, new)

    with pytest.raises(ValueError, match=message):
        metadata.described(package)


def test_every_place_names_the_same_pythons() -> None:
    pythons = Workspace().settings["pythons"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    template = tomllib.loads((ROOT / "tools/template/shared/pyproject.toml").read_text(encoding="utf-8"))
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    workflows = "".join(file.read_text(encoding="utf-8") for file in (ROOT / ".github").rglob("*.yml"))

    assert {package.requires_python for package in Workspace().packages.values()} == {f">={pythons[0]}"}
    assert template["project"]["requires-python"] == f">={pythons[0]}"
    assert settings["tool"]["ruff"]["target-version"] == f"py{pythons[0].replace('.', '')}"
    assert f"They need Python {pythons[0]} and torch" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert " ".join(f"python{python}" for python in reversed(pythons)) in script
    assert f"sys.version_info < ({pythons[0].replace('.', ', ')})" in script
    assert set(re.findall(r'python(?:-version)?: "?(3\.\d+)', workflows)) <= set(pythons)
