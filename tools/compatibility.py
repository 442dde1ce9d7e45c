"""The page of compatibility: what each package of this tree needs, which versions are released, and what CI tests.

python -m tools.compatibility
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.version import Version

from tools import matrix
from tools.gpu import gpu_tests
from tools.workspace import PREFIX, ROOT, Package, Workspace

_PINNED = ROOT / "tools" / "constraints" / "pinned.txt"
_HEAD = """---
hide: [toc]
---

# Compatibility

What each version needs, and the versions that are released. Bounds of torch and Python are lower bounds. A package that
needs composer-core `>=0.1,<1` runs with every release of core in that range.

| package | version | released | Python | torch | packages of this project | others |
|---|---|---|---|---|---|---|
"""
_TESTED = """
## Tested

The versions of torch that CI tests each package with, by version of Python. "newest" is the latest release of torch and
"nightly" its latest nightly build on the day of the test; "on CUDA" marks the tests that need a GPU, all others run on
a CPU. For each change, CI tests the packages that it can affect.

"""


def compatibility(workspace: Workspace, columns: Iterable[matrix.Column]) -> str:
    """Return the tables as a page in Markdown.

    Args:
        workspace: The packages; their releases are git tags.
        columns: The plan of CI for a change that can affect everything.
    """
    needs = "".join(f"| {' | '.join(_row(workspace, package))} |\n" for package in workspace.packages.values())
    groups: dict[tuple[str, ...], list[str]] = {}
    columns = list(columns)
    pythons = sorted({column.python for column in columns}, key=Version)
    for name in workspace.names:
        tested = _tested(workspace, name, columns)
        groups.setdefault(tuple(", ".join(tested[python]) or "not tested" for python in pythons), []).append(name)
    lines = [
        f"| packages | {' | '.join(f'Python {python}' for python in pythons)} |",
        "|---" * (1 + len(pythons)) + "|",
    ]
    for cells, names in groups.items():
        lines.append(f"| {'all' if len(groups) == 1 else ', '.join(names)} | {' | '.join(cells)} |")
    return _HEAD + needs + _TESTED + "\n".join(lines) + "\n"


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


def _tested(workspace: Workspace, name: str, columns: Iterable[matrix.Column]) -> Mapping[str, list[str]]:
    """Return the versions of torch that a package is tested with, by version of Python."""
    pinned = re.search(r"^torch==(\S+)", _PINNED.read_text(encoding="utf-8"), re.MULTILINE)
    shown = {"oldest": _lowest_torch(workspace, name), "pinned": pinned[1] if pinned else "pinned"}
    shown |= {"newest": "newest", "nightly": "nightly"}
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for column in columns:
        for session in column.sessions:
            kind, _, package = session.removesuffix(")").partition("(")
            on_gpu = session == "gpu(all)" and name in gpu_tests(workspace.root)
            if on_gpu or (package == name and not kind.startswith("regress")):  # that session tests releases
                found[column.python].add((column.device, column.torch))
    tested: dict[str, list[str]] = defaultdict(list)
    for device, suffix in (("cpu", ""), ("cuda", " on CUDA")):
        for torch, version in shown.items():
            for python, used in found.items():
                if (device, torch) in used:
                    tested[python].append(version + suffix)
    return tested


def _lowest_torch(workspace: Workspace, name: str) -> str:
    """Return the lowest version of torch that a package and those that it needs allow."""
    needed = (workspace[each] for each in (name, *workspace.siblings(name)))
    bounds = [
        Version(specifier.version)
        for package in needed
        for requirement in package.dependencies
        if requirement.name == "torch"
        for specifier in requirement.specifier
        if specifier.operator == ">="
    ]
    return str(max(bounds)) if bounds else "oldest"


if __name__ == "__main__":
    everything = Workspace()
    print(compatibility(everything, matrix.plan(everything, matrix.listing(everything), {})))
