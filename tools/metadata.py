"""Write what registries show beside a package: authors, keywords, classifiers and links. `--check` only compares.

    python -m tools.metadata [--check]

The fields follow from a package and from `[tool.composer]` in the top-level pyproject.toml. Further keywords of a
package stay. hatchling refuses classifiers that the registry does not know.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tools.workspace import Package, Workspace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
_FIELDS = re.compile(r"^(authors|keywords|classifiers) = \[[^\]]*\]\n", re.MULTILINE)
_URLS = re.compile(r"^\[project\.urls\]\n(?:.+\n)*\n?", re.MULTILINE)
_PYTHON = re.compile(r"^requires-python = .*\n", re.MULTILINE)
_NEXT_TABLE = re.compile(r"^\[(?!build-system\]|project\])", re.MULTILINE)


def keywords(package: Package) -> list[str]:
    """Return the keywords of a package that follow from its name and what it registers."""
    own = {package.name.partition("-")[2]} if package.source.is_dir() else set()
    if "composer.algorithms" in package.entry_points:
        own.add("training-method")
    return sorted({*_KEYWORDS, *own})


def classifiers(package: Package, pythons: list[str]) -> list[str]:
    """Return the trove classifiers of a package.

    Args:
        package: The package.
        pythons: The Python versions that are tested, for example `["3.10", "3.11"]`.
    """
    allowed = SpecifierSet(package.requires_python)
    found = {f"Programming Language :: Python :: {python}" for python in pythons if allowed.contains(python)}
    if package.source.is_dir():  # a `py.typed`, its own or that of core, holds for all sources; see check_wheels.py
        found.add("Typing :: Typed")
    return sorted({*_CLASSIFIERS, *found}, key=_by_version)


def _by_version(classifier: str) -> list[tuple[int, str]]:
    """Sort "3.9" before "3.10"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", classifier)]


def urls(package: Package, repository: str | None) -> dict[str, str]:
    """Return the links of a package; none while the address of the repository is not set."""
    if repository is None:
        return {}
    base = repository.rstrip("/")
    folder = f"packages/{package.name}"
    return {
        "Homepage": base,
        "Documentation": f"{base}/tree/main/{folder}#readme",
        "Changelog": f"{base}/blob/main/{folder}/CHANGELOG.md",
        "Issues": f"{base}/issues",
        "Source": f"{base}/tree/main/{folder}",
    }


def current(workspace: Workspace, package: Package) -> str:
    """Return the text that the pyproject.toml of a package should have.

    Raises:
        ValueError: A setting is missing, or the `[project]` table has no line `requires-python`.
    """
    path = package.path / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    settings = workspace.settings
    present = tomllib.loads(text)["project"].get("keywords", [])
    fields = {
        "authors": [{"name": name} for name in settings["authors"]],
        "keywords": sorted({*present, *keywords(package)}),
        "classifiers": classifiers(package, settings["pythons"]),
    }
    text = _URLS.sub("", _FIELDS.sub("", text))
    lines = "".join(f"{key} = {_array(values)}\n" for key, values in fields.items())
    text, count = _PYTHON.subn(lambda match: match[0] + lines, text)
    if count != 1:
        raise ValueError(f"{path} must have one line `requires-python = ...`, got {count}.")
    links = urls(package, settings.get("repository"))
    if links:
        table = "[project.urls]\n" + "".join(f"{name} = {json.dumps(url)}\n" for name, url in links.items()) + "\n"
        following = _NEXT_TABLE.search(text)
        at = following.start() if following else len(text)
        text = text[:at] + table + text[at:]
    return text


def _array(values: list[str] | list[dict[str, str]]) -> str:
    items = [json.dumps(one) if isinstance(one, str) else f"{{ name = {json.dumps(one['name'])} }}" for one in values]
    line = f"[{', '.join(items)}]"
    return line if len(line) < 100 else "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def write(workspace: Workspace, package: Package) -> bool:
    """Write the fields of a package; return True if any changed."""
    path = package.path / "pyproject.toml"
    text = current(workspace, package)
    if text == path.read_text(encoding="utf-8"):
        return False
    path.write_text(text, encoding="utf-8")
    return True


def problems(workspace: Workspace) -> Iterator[str]:
    """Yield a sentence for each package whose fields are missing or out of date."""
    for package in workspace.packages.values():
        path = package.path / "pyproject.toml"
        text = path.read_text(encoding="utf-8")
        expected = current(workspace, package)
        if text != expected:
            old, new = tomllib.loads(text)["project"], tomllib.loads(expected)["project"]
            fields = [key for key in ("authors", "keywords", "classifiers", "urls") if old.get(key) != new.get(key)]
            what = ", ".join(f"`{key}`" for key in fields) or "the order or form of its fields"
            yield f"{path.relative_to(workspace.root)}: {what} must follow from the package. Run `nox -s fix`."


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what registries show beside a package.")
    parser.add_argument("--check", action="store_true", help="only say what is missing or out of date")
    workspace = Workspace(Path.cwd())
    try:
        if parser.parse_args().check:
            sys.exit("\n".join(problems(workspace)) or None)
        changed = [name for name, package in workspace.packages.items() if write(workspace, package)]
    except ValueError as error:
        sys.exit(str(error))
    print(f"written: {', '.join(changed) or 'none, all are current'}")
    if "repository" not in workspace.settings:
        print("no links: set `repository` of `[tool.composer]` in pyproject.toml")


if __name__ == "__main__":
    main()
