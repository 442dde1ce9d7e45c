"""Turn nox's own list of sessions into the matrix of a CI workflow: one job for each column.

    nox --list --json --tags ci | python -m tools.ci_matrix [BASE]

With BASE, columns that run package by package keep only the packages that the change since BASE can affect.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tools.workspace import Workspace

PYTHON = "3.12"  # for sessions without a Python of their own
OLDEST_PYTHON = "3.11"


def matrix(listing: list[dict[str, Any]], packages: set[str]) -> dict[str, list[dict[str, str]]]:
    """Return the matrix `{"include": [{"column", "python", "sessions"}]}`.

    Args:
        listing: The output of `nox --list --json`.
        packages: The packages to test.
    """
    columns: dict[str, dict[str, str]] = {}
    for entry in listing:
        package = entry["call_spec"].get("package")
        if package is not None and package not in packages:
            continue
        name, session = entry["session"].split("(")[0], entry["session"]
        python = entry["python"] or (OLDEST_PYTHON if entry["name"] == "oldest" else PYTHON)
        column = columns.setdefault(name, {"column": name, "python": python, "sessions": ""})
        column["sessions"] = f"{column['sessions']} '{session}'".strip()
    return {"include": list(columns.values())}


def main() -> None:
    workspace = Workspace()
    packages = workspace.changed(sys.argv[1]) if len(sys.argv) > 1 else workspace.names
    print(json.dumps(matrix(json.load(sys.stdin), set(packages))))


if __name__ == "__main__":
    main()
