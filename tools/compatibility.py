"""The table of compatibility: what each package of this tree needs, from what it declares.

python -m tools.compatibility
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.requirements import Requirement

from tools.workspace import PREFIX, Package, Workspace

__all__ = ["compatibility"]

_HEAD = """---
hide: [toc]
---

# Compatibility

What each version needs. Bounds of torch and Python are lower bounds: newer versions are tested as they appear
(`nox -s newest`), the lowest ones at every change (`nox -s oldest`). A package that needs composer-core `>=0.1,<1` runs
with every release of core in that range.

| package | version | Python | torch | packages of this project | others |
|---|---|---|---|---|---|
"""


def compatibility(workspace: Workspace) -> str:
    """Return the table as a page in Markdown.

    Args:
        workspace: The packages.
    """
    return _HEAD + "".join(f"| {' | '.join(_row(package))} |\n" for package in workspace.packages.values())


def _row(package: Package) -> tuple[str, ...]:
    if package.name == "composer-all":
        own, others, torch = "all of them", "", ""
    else:
        mine = [one for one in package.dependencies if one.name.startswith(PREFIX)]
        rest = [one for one in package.dependencies if one not in mine and one.name != "torch"]
        own, others = _joined(mine), _joined(rest)
        torch = ", ".join(str(one.specifier) for one in package.dependencies if one.name == "torch")
    return package.name, package.version, package.requires_python, torch, own, others


def _joined(requirements: Iterable[Requirement]) -> str:
    return ", ".join(f"{one.name} {one.specifier}".strip() for one in requirements)


if __name__ == "__main__":
    print(compatibility(Workspace()))
