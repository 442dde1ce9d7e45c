"""The plan of CI: which sessions run on which Python and torch, on a CPU or a GPU, in columns of at most 15 minutes.

python -m tools.matrix --plan [BASE]         # print it; with BASE, only what the change since that commit can affect
python -m tools.matrix --workflow [BASE]     # the same as outputs of a GitHub workflow
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu import gpu_tests
from tools.workspace import Workspace

LIMIT = 15 * 60  # estimated seconds of a column
_SETUP = 90  # seconds of a job before nox starts
_PYTHON = "3.12"  # for sessions without a Python of their own
_TORCH = {"oldest": "oldest", "newest": "newest", "nightly": "nightly"}  # of sessions; else pinned
# Estimated seconds, from a run of all sessions on two cores: the tests of all packages took 1,530 seconds in 41
# environments, with 5,151 test functions. First for an environment and a test function, then for a check.
_ENVIRONMENT, _TEST_FUNCTION = 8, 0.25
_CHECKS = {
    "together": 800,
    "tools": 280,
    "site": 240,
    "docs": 160,
    "wheels": 140,
    "clusters": 80,
    "types": 60,
    "imports": 30,
    "lint": 30,
    "gpu": 300,
}


@dataclass(frozen=True)
class Column:
    """Sessions that one job runs, one after the other.

    Attributes:
        name: Unique in the plan.
        python: The Python version.
        torch: "oldest", "pinned", "newest" or "nightly".
        device: "cpu" or "cuda".
        sessions: The names of the nox sessions.
        seconds: The estimated time.
    """

    name: str
    python: str
    torch: str
    device: str
    sessions: tuple[str, ...]
    seconds: float


def plan(
    workspace: Workspace, listing: Iterable[Mapping[str, Any]], touched: Sequence[str] | None = None
) -> list[Column]:
    """Return the columns that a change needs: sessions in their order, a new column where one is full.

    Args:
        workspace: The packages.
        listing: The output of `nox --list --json`.
        touched: The packages whose files changed; None: everything may have.
    """
    affected = set(workspace.names if touched is None else workspace.affected(touched))
    changed = set(workspace.names if touched is None else touched)
    pythons, alike = workspace.settings["pythons"], workspace.alike()
    groups: dict[tuple[str, str, str, str], list[tuple[list[str], float]]] = {}
    for entry in listing:
        name, package = entry["name"], entry["call_spec"].get("package")
        packages = alike.get(entry["call_spec"].get("alike"), [] if package is None else [package])
        if name == "gpu":
            # One environment for everything if everything is tested.
            needed = package == "all" if touched is None else package in affected & gpu_tests(workspace.root).keys()
        elif name == "regress":  # a release is tested with changes of what it needs
            needed = bool(changed & set(workspace.siblings(package, with_tests=True)))
        elif name == "pythons":  # the sessions `oldest` and `newest` test on the first and the last one
            needed = entry["python"] in pythons[1:-1] and bool(affected & set(packages))
        else:
            needed = not packages or bool(affected & set(packages))
        if not needed:
            continue
        python = entry["python"] or {"oldest": pythons[0], "newest": pythons[-1]}.get(name, _PYTHON)
        column = entry["session"].split("(")[0] if packages else "checks"
        key = (column, python, _TORCH.get(name, "pinned"), "cuda" if name == "gpu" else "cpu")
        seconds = _seconds(workspace, name, packages)
        columns = groups.setdefault(key, [])
        if not columns or columns[-1][1] + seconds > LIMIT - _SETUP:
            columns.append(([], 0.0))
        sessions, before = columns[-1]
        columns[-1] = ([*sessions, entry["session"]], before + seconds)
    return [
        Column(key[0] if len(columns) == 1 else f"{key[0]} {number}", *key[1:], tuple(sessions), _SETUP + seconds)
        for key, columns in groups.items()
        for number, (sessions, seconds) in enumerate(columns, start=1)
    ]


def _seconds(workspace: Workspace, session: str, packages: Sequence[str]) -> float:
    if not workspace.packages.keys() >= set(packages) or not packages:
        return _CHECKS[session]
    files = (file for name in packages for file in workspace[name].tests.rglob("test_*.py"))
    tests = sum(len(re.findall(r"^ *def test_", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in files)
    return _ENVIRONMENT + _TEST_FUNCTION * tests


def text(columns: Sequence[Column]) -> str:
    """Return the plan as text: a line for each column, with its sessions below."""
    lines = [f"{'column':<16} {'python':<6} {'torch':<8} {'device':<6} {'minutes':>7}  sessions"]
    for column in columns:
        lines.append(
            f"{column.name:<16} {column.python:<6} {column.torch:<8} {column.device:<6} {column.seconds / 60:>7.0f}"
            f"  {len(column.sessions)}"
        )
        lines += textwrap.wrap(" ".join(column.sessions), 116, initial_indent="    ", subsequent_indent="    ")
    total = sum(column.seconds for column in columns) / 60
    longest = max((column.seconds for column in columns), default=0) / 60
    lines.append(f"{len(columns)} columns, {total:.0f} minutes in all, the longest {longest:.0f}, by numbers of tests.")
    return "\n".join(lines)


def workflow(columns: Iterable[Column]) -> str:
    """Return the plan as outputs of a step of a GitHub workflow: matrices named `cpu`, `nightly` and `cuda`."""
    jobs: dict[str, list[dict[str, str]]] = {"cpu": [], "nightly": [], "cuda": []}
    for column in columns:
        job = column.torch if column.torch == "nightly" else column.device
        sessions = "\n".join(column.sessions)
        jobs[job].append({"column": column.name, "python": column.python, "torch": column.torch, "sessions": sessions})
    return "\n".join(f"{job}={json.dumps({'include': entries})}" for job, entries in jobs.items())


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    """Return what nox knows of the sessions that CI runs."""
    command = [sys.executable, "-m", "nox", "--list", "--json", "--tags", "ci"]
    run = subprocess.run(command, cwd=workspace.root, check=True, capture_output=True, text=True)
    entries: list[dict[str, Any]] = json.loads(run.stdout)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--plan", action="store_true", help="print the plan")
    action.add_argument("--workflow", action="store_true", help="print it as outputs of a GitHub workflow")
    parser.add_argument("base", nargs="?", help="a commit; only what the change since then can affect")
    options = parser.parse_args()
    workspace = Workspace()
    try:
        touched = None if options.base is None else workspace.touched(options.base)
    except ValueError as error:
        sys.exit(str(error))
    columns = plan(workspace, listing(workspace), touched)
    print(text(columns) if options.plan else workflow(columns))


if __name__ == "__main__":
    main()
