"""Check that every package changed since a commit has a change fragment, and that each changelog has its version.

python -m tools.changes [BASE]    # default origin/main
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.workspace import Package, Workspace

UNRELEASED = "(unreleased)"
_KINDS = ("breaking", "added", "fixed")


def problems(package: Package, touched: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each problem of a package's changelog and fragments.

    Args:
        package: The package.
        touched: The changed paths, relative to its directory.
    """
    changelog = package.news
    if not changelog.startswith("# Changelog\n"):
        yield f"{package.name}: CHANGELOG.md must start with `# Changelog`. New entries go below that line."
    if f"## {package.version} (" not in changelog:
        yield f"{package.name}: CHANGELOG.md must have a section for {package.version}, got none. Use `nox -s release`."
    for fragment in package.fragments:
        parts = fragment.name.split(".")
        if len(parts) != 3 or parts[1] not in _KINDS:
            yield f"{package.name}: a fragment must be named <issue>.<{'|'.join(_KINDS)}>.md, got {fragment.name!r}."
    first_release = f"## {package.version} {UNRELEASED}" in changelog
    shipped = any(path.startswith("src/") or path == "pyproject.toml" for path in touched)
    if shipped and not package.fragments and not first_release:
        yield (
            f"{package.name}: a change of the source needs a fragment for the changelog, got none. Write "
            "changes/<issue>.<kind>.md."
        )


def touched_since(workspace: Workspace, package: Package, base: str) -> list[str]:
    """Return the paths, relative to the package, that differ between the commit `base` and the working tree."""
    command = ["git", "diff", "--name-only", "-z", "--relative", base, "--", "."]
    run = subprocess.run(command, cwd=package.path, check=True, capture_output=True, text=True)
    return list(filter(None, run.stdout.split("\0")))


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    workspace = Workspace(Path.cwd())
    all_problems = [
        problem
        for package in workspace.packages.values()
        for problem in problems(package, touched_since(workspace, package, base))
    ]
    sys.exit("\n".join(all_problems) or None)


if __name__ == "__main__":
    main()
