"""Add to a package what registries show, where it is built: authors, keywords, classifiers, links, and its page.

All of that follows from the package and from `[tool.composer]` in the top-level pyproject.toml, so no package holds it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tools.markdown import with_links
from tools.workspace import Package, Workspace

_KEYWORDS = ("deep-learning", "machine-learning", "pytorch", "training")
_CLASSIFIERS = (
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: OS Independent",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
)
_PAGE = ("README.md", "COMPOSITION.md")  # the second is a part of the page of composer-all


def keywords(package: Package) -> list[str]:
    """Return the keywords of a package, which follow from its name and what it registers."""
    own = {package.name.partition("-")[2]} if package.source.is_dir() else set()
    if "composer.algorithms" in package.entry_points:
        own.add("training-method")
    return sorted({*_KEYWORDS, *own})


def classifiers(package: Package, pythons: list[str]) -> list[str]:
    """Return the trove classifiers of a package; hatchling refuses those that the registry does not know.

    Args:
        package: The package.
        pythons: The Python versions that are tested, for example `["3.11", "3.12"]`.
    """
    allowed = SpecifierSet(package.requires_python)
    found = {f"Programming Language :: Python :: {python}" for python in pythons if allowed.contains(python)}
    if package.source.is_dir():  # a `py.typed`, its own or that of core, holds for all sources; see check_wheels.py
        found.add("Typing :: Typed")
    return sorted({*_CLASSIFIERS, *found}, key=_by_version)


def _by_version(classifier: str) -> list[tuple[int, str]]:
    """Sort "3.9" before "3.10"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", classifier)]


def urls(package: Package, repository: str) -> dict[str, str]:
    """Return the links of a package; `repository` is the address of the repository."""
    folder = f"packages/{package.name}"
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/{folder}#readme",
        "Changelog": f"{repository}/blob/main/{folder}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Source": f"{repository}/tree/main/{folder}",
    }


def page(package: Package, text: str, repository: str) -> str:
    """Return the README of a package for readers who have no other file of it.

    Pictures and links lead to the repository as it is at the tag of the package's version.

    Args:
        package: The package.
        text: The README.
        repository: The address of the repository.

    Raises:
        ValueError: A link leads to a file that does not exist.
    """

    def address(label: str, path: str, anchor: str) -> str:
        file = Path(os.path.normpath(package.path / path))
        if not file.exists():
            raise ValueError(f"{package.name}: the link of the README to {path!r} leads to no file.")
        kind = "raw" if label.startswith("!") else "tree" if file.is_dir() else "blob"
        place = file.relative_to(package.workspace_root).as_posix()
        return f"{label}({repository}/{kind}/{package.name}-v{package.version}/{place}{anchor})"

    return with_links(text, address)


def described(package: Package) -> str:
    """Return the pyproject.toml of a package with what registries show.

    Raises:
        ValueError: A setting of the top-level pyproject.toml is missing.
    """
    settings = Workspace(package.workspace_root).settings
    fields = {"keywords": keywords(package), "classifiers": classifiers(package, settings["pythons"])}
    authors = ", ".join(f"{{ name = {json.dumps(name)} }}" for name in settings["authors"])
    lines = f"authors = [{authors}]\n" + "".join(f"{key} = {json.dumps(values)}\n" for key, values in fields.items())
    text = (package.path / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace("\n[project]\n", f"\n[project]\n{lines}", 1)
    if repository := settings.get("repository"):
        links = "".join(f"{name} = {json.dumps(url)}\n" for name, url in urls(package, repository).items())
        text += f"\n[project.urls]\n{links}"
    return text


def stage(package: Package, folder: Path) -> Path:
    """Copy a package into `folder`, beside links to the rest of its repository, with what registries show.

    Raises:
        ValueError: A setting is missing, or a link of its README leads to no file.
    """
    staged = folder / "packages" / package.name
    shutil.copytree(package.path, staged, ignore=shutil.ignore_patterns("__pycache__"))
    (staged / "pyproject.toml").write_text(described(package), encoding="utf-8")
    if repository := Workspace(package.workspace_root).settings.get("repository"):
        for file in map(staged.joinpath, _PAGE):
            if file.is_file():
                file.write_text(page(package, file.read_text(encoding="utf-8"), repository), encoding="utf-8")
    root = package.workspace_root
    shutil.copyfile(root / ".gitignore", folder / ".gitignore")  # hatchling puts it into sdists
    # Building composer-core and composer-all reads the declarations of all packages.
    for path in (root / "pyproject.toml", root / "tools", *root.glob("packages/*")):
        if path != package.path:
            (folder / path.relative_to(root)).symlink_to(path)
    return staged
