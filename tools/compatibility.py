"""The page of compatibility: what each package of this tree needs, which versions are released, and what CI tests."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.requirements import Requirement

from tools.markdown import folded
from tools.workspace import PREFIX, ROOT, Package, Workspace

_PINNED = ROOT / "tools" / "constraints" / "pinned.txt"
_HEAD = """---
hide: [toc]
---

# Compatibility

What each version needs, and the versions that are released. Bounds of torch and Python are lower bounds. A package that
needs composer-core `>=0.1,<1` runs with every release of core in that range.
"""
_COLUMNS = """| package | version | released | Python | torch | packages of this project | others |
|---|---|---|---|---|---|---|
"""


def compatibility(workspace: Workspace) -> str:
    """Return the page in Markdown. Releases are git tags."""
    (torch,) = re.findall(r"^torch==(\S+)", _PINNED.read_text(encoding="utf-8"), re.MULTILINE)
    first, *between, last = workspace.settings["pythons"]
    tested = (
        f"CI tests each package with torch {torch} on Python {' and '.join(between)}, with the lowest version of "
        f"everything that it allows on Python {first}, with the latest versions on Python {last}, and with the latest "
        "nightly build of torch, on a CPU; what needs a GPU, on one. For each change, it tests the packages that the "
        "change can affect.\n"
    )
    rows: dict[str, list[str]] = {"methods": [], "other packages": []}
    for package in workspace.packages.values():
        kind = "methods" if "composer.algorithms" in package.entry_points else "other packages"
        rows[kind].append(f"| {' | '.join(_row(workspace, package))} |\n")
    tables = [folded(f"{len(found)} {kind}", _COLUMNS + "".join(found)) for kind, found in rows.items()]
    return "\n".join([_HEAD, *tables, f"## Tested\n\n{tested}"])


def _row(workspace: Workspace, package: Package) -> tuple[str, ...]:
    if package.name == "composer-all":
        own, others, torch = "all of them", "", ""
    else:
        mine = [one for one in package.dependencies if one.name.startswith(PREFIX)]
        rest = [one for one in package.dependencies if one not in mine and one.name != "torch"]
        own, others = _joined(mine), _joined(rest)
        torch = ", ".join(str(one.specifier) for one in package.dependencies if one.name == "torch")
    released = ", ".join(map(str, reversed(workspace.releases(package.name)))) or "not released yet"
    return package.name, package.version, released, package.requires_python, torch, own, others


def _joined(requirements: Iterable[Requirement]) -> str:
    return ", ".join(f"{one.name} {one.specifier}".strip() for one in requirements)
