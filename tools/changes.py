"""Check that every package changed since a commit has a change fragment, and that each changelog has its version.

python -m tools.changes [BASE]    # default origin/main
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.workspace import Package, Workspace

UNRELEASED = "(unreleased)"
_KINDS = ("breaking", "added", "fixed")


def problems(package: Package, touched: Iterable[str], version_before: str | None = None) -> Iterator[str]:
    """Yield a sentence for each problem of a package's changelog and fragments.

    Args:
        package: The package.
        touched: The changed paths, relative to its directory.
        version_before: The version in the commit that is compared with, if the package was there.
    """
    changelog = package.news
    if not changelog.startswith("# Changelog\n"):
        yield f"{package.name}: CHANGELOG.md must start with `# Changelog`. New entries go below that line."
    if f"## {package.version} (" not in changelog:
        yield f"{package.name}: CHANGELOG.md must have a section for {package.version}, got none. Use `nox -s release`."
    for fragment in package.fragments:
        yield from fragment_problems(package, fragment)
    first_release = f"## {package.version} {UNRELEASED}" in changelog
    is_release = version_before not in (None, package.version)  # its fragments are in the changelog
    shipped = any(path.startswith("src/") or path == "pyproject.toml" for path in touched)
    if shipped and not package.fragments and not first_release and not is_release:
        yield (
            f"{package.name}: a change of the source needs a fragment for the changelog, got none. Write "
            "changes/<issue>.<kind>.md."
        )


def fragment_problems(package: Package, fragment: Path) -> Iterator[str]:
    """Yield a sentence for each problem of a fragment."""
    parts = fragment.name.split(".")
    if len(parts) != 3 or parts[1] not in _KINDS:
        yield f"{package.name}: a fragment must be named <issue>.<{'|'.join(_KINDS)}>.md, got {fragment.name!r}."
    if not fragment.read_text(encoding="utf-8").strip():
        yield f"{package.name}: a fragment must say what changed, got an empty {fragment.name!r}."


def touched_since(workspace: Workspace, package: Package, base: str) -> list[str]:
    """Return the paths, relative to the package, that differ from the commit where this branch left `base`."""
    prefix = f"{package.path.relative_to(workspace.root).as_posix()}/"
    return [path.removeprefix(prefix) for path in workspace.paths_changed(base) if path.startswith(prefix)]


def version_in(workspace: Workspace, package: Package, base: str) -> str | None:
    """Return the version of a package in the commit where this branch left `base`; None if it was not there."""
    path = (package.path / "pyproject.toml").relative_to(workspace.root).as_posix()
    found = re.search(r'^version = "(.*)"$', workspace.text_at_fork(base, path), re.MULTILINE)
    return found[1] if found else None


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    workspace = Workspace(Path.cwd())
    try:
        all_problems = [
            problem
            for package in workspace.packages.values()
            for problem in problems(
                package, touched_since(workspace, package, base), version_in(workspace, package, base)
            )
        ]
    except ValueError as error:
        sys.exit(str(error))
    sys.exit("\n".join(all_problems) or None)


if __name__ == "__main__":
    main()
