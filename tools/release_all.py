"""Release every package that has no release yet, each after those it needs.

python -m tools.release_all --limit 20     # resumable: call it again for the next ones

A registry limits how many new projects one account creates in a day; `--limit` stays below that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.release import ReleaseError, release
from tools.workspace import Workspace


def release_all(workspace: Workspace, limit: int) -> list[str]:
    """Release packages without a release, at the versions that they declare; return the tags.

    Args:
        workspace: The packages.
        limit: The maximum number of releases.

    Raises:
        ReleaseError: A package cannot be released; those before it are.
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"`--limit` must be at least 1, got {limit}.")
    waiting = [name for name in workspace.in_order() if not workspace.releases(name)]
    tags = []
    for name in waiting[:limit]:
        try:
            # Anew, because composer-all is built from what all others declare.
            fresh = Workspace(workspace.root)
            tags.append(release(fresh, fresh[name], fresh[name].version))
        except ReleaseError as error:
            raise ReleaseError(f"{name}: {error} Released before it: {', '.join(tags) or 'none'}.") from error
        print(tags[-1], flush=True)
    left = waiting[limit:]
    print(f"left: {', '.join(left) or 'none'}", file=sys.stderr)
    return tags


def main() -> None:
    parser = argparse.ArgumentParser(description="Release every package that has no release yet.")
    parser.add_argument("--limit", type=int, default=20, help="the maximum number of releases of this call (20)")
    try:
        release_all(Workspace(Path.cwd()), parser.parse_args().limit)
    except (ReleaseError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
