"""Make `.dev/src`: links to all sources as one `composer` package, for editors and type checkers.

They expect a package in one directory. Running code does not need it: editable installs find each other through
`composer.__path__`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.workspace import Workspace


def link(workspace: Workspace, farm: Path) -> int:
    """Replace `farm` by directories that hold a link to each source file of each package.

    Args:
        workspace: The packages.
        farm: The directory to create.

    Returns:
        The number of links.

    Raises:
        FileExistsError: Two packages own one path.
    """
    shutil.rmtree(farm, ignore_errors=True)
    count = 0
    for package in workspace.packages.values():
        for file in sorted(package.source.rglob("*")):
            inside = file.relative_to(package.source)
            if not file.is_file() or "__pycache__" in inside.parts:
                continue
            target = farm / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
            count += 1
    return count


def main() -> None:
    workspace = Workspace()
    farm = workspace.root / ".dev" / "src"
    print(f"{link(workspace, farm)} links in {farm.relative_to(workspace.root)}")


if __name__ == "__main__":
    main()
