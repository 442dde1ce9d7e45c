"""Write which package registers which name into composer-core, where it serves the messages about missing packages.

python -m tools.catalog            # write
python -m tools.catalog --check    # fail if what is written is wrong
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

from tools.workspace import Package, Workspace

Catalog = dict[str, dict[str, str]]


def collect(workspace: Workspace) -> Catalog:
    """The catalog `{group: {name: distribution}}` of all `composer.*` entry points of the packages.

    The group `"required_on_load"` is not one of entry points: it holds the algorithms that say so of themselves.

    Raises:
        ValueError: Two packages register the same name in one group.
    """
    catalog: Catalog = {}
    for package in workspace.packages.values():
        for group, points in package.entry_points.items():
            if not group.startswith("composer."):
                continue
            names = catalog.setdefault(group, {})
            for name in points:
                other = names.setdefault(name, package.name)
                if other != package.name:
                    raise ValueError(
                        f"`{group}.{name}` must have one owner, got {other!r} and {package.name!r}. "
                        "Rename one of the two."
                    )
        for name in _required(package):
            catalog.setdefault("required_on_load", {})[name] = package.name
    return {group: dict(sorted(names.items())) for group, names in sorted(catalog.items())}


def _required(package: Package) -> list[str]:
    """The package's algorithms with a `required_on_load` of their own, read from its source."""
    names = package.entry_points.get("composer.algorithms", {})
    return [
        node.name
        for path in sorted(package.source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name in names
        and any(isinstance(item, ast.FunctionDef) and item.name == "required_on_load" for item in node.body)
    ]


def path_of(workspace: Workspace) -> Path:
    """Where the catalog is kept."""
    return workspace.root / "packages/composer-core/src/composer/core/_catalog.json"


def text_of(catalog: Catalog) -> str:
    return json.dumps(catalog, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write which package registers which name into composer-core.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the file is not up to date")
    check: bool = parser.parse_args().check
    workspace = Workspace()
    path, text = path_of(workspace), text_of(collect(workspace))
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    if check:
        sys.exit(f"{path.relative_to(workspace.root)} is not what the entry points say. Run `nox -s fix`.")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
