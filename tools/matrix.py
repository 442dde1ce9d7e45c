"""The plan of CI: which sessions run on which Python and torch, on a CPU or a GPU, in columns of at most 20 minutes.

python -m tools.matrix --plan [BASE]         # print it; with BASE, only what the change since that commit can affect
python -m tools.matrix --workflow [BASE]     # the same as outputs of a GitHub workflow
python -m tools.matrix --record .nox/ci-tests.json .nox/ci-checks.json    # take measured seconds from nox's reports
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu import gpu_tests
from tools.workspace import Workspace

# Many packages depend on these, so released ones are tested against changes of them.
HUBS = (
    "composer-core",
    "composer-trainer",
    "composer-checkpoint",
    "composer-optim",
    "composer-loggers",
    "composer-metrics",
)
SECONDS = Path(__file__).with_name("seconds.json")
LIMIT = 20 * 60  # seconds of a column
_SETUP = 90  # seconds of a job before nox starts
_PYTHON = "3.12"  # for sessions without a Python of their own
_OLDEST_PYTHON = "3.11"
_TORCH = {"oldest": "oldest", "newest": "newest", "nightly": "nightly"}  # of sessions; else pinned
_WITH_PYTEST = ("together", "docs")  # of the sessions without a package; these can be split
# Estimates for sessions that were not measured yet.
_CHECK = 300
_PACKAGE = 25
_TEST_FUNCTION = 1.5


@dataclass(frozen=True)
class Column:
    """Sessions that one job runs, one after the other.

    Attributes:
        name: Unique in the plan.
        python: The Python version.
        torch: "oldest", "pinned", "newest" or "nightly".
        device: "cpu" or "cuda".
        sessions: The names of the nox sessions.
        shard: The part of a session's tests, for example "1/3"; "" for all.
        seconds: The estimated time.
        measured: Whether the times of all sessions were measured.
    """

    name: str
    python: str
    torch: str
    device: str
    sessions: tuple[str, ...]
    shard: str
    seconds: float
    measured: bool

    @property
    def command(self) -> list[str]:
        """The arguments of nox."""
        return ["--session", *self.sessions, *(["--", "--shard", self.shard] if self.shard else [])]


@dataclass(frozen=True)
class _Session:
    name: str
    package: str | None
    seconds: float
    measured: bool


def plan(
    workspace: Workspace,
    listing: Iterable[Mapping[str, Any]],
    measured: Mapping[str, float],
    touched: Sequence[str] | None = None,
) -> list[Column]:
    """Return the columns that a change needs.

    Args:
        workspace: The packages.
        listing: The output of `nox --list --json`.
        measured: Seconds of sessions on the pinned versions, as in `seconds.json`.
        touched: The packages whose files changed; None: everything may have.
    """
    affected = set(workspace.names if touched is None else workspace.affected(touched))
    hubs = set(HUBS) & set(workspace.names if touched is None else touched)
    groups: dict[tuple[str, str, str, str], list[_Session]] = {}
    for entry in listing:
        name, package = entry["name"], entry["call_spec"].get("package")
        if name == "gpu":
            # One environment for everything if everything is tested.
            needed = package == "all" if touched is None else package in affected & gpu_tests(workspace.root).keys()
        elif name == "regress":
            needed = package in affected and bool(hubs & set(workspace.siblings(package)))
        else:
            needed = package is None or package in affected
        if not needed:
            continue
        python = entry["python"] or (_OLDEST_PYTHON if name == "oldest" else _PYTHON)
        key = (entry["session"].split("(")[0], python, _TORCH.get(name, "pinned"), "cuda" if name == "gpu" else "cpu")
        groups.setdefault(key, []).append(_session(workspace, entry, measured))
    return [column for key, sessions in groups.items() for column in _columns(key, sessions)]


def _session(workspace: Workspace, entry: Mapping[str, Any], measured: Mapping[str, float]) -> _Session:
    package = entry["call_spec"].get("package")
    if entry["name"] == "regress" and not workspace.releases(package):
        return _Session(entry["session"], package, 1, True)  # it is skipped
    own = entry["name"] if package is None else f"{entry['name']}({package})"
    for name in (own, f"tests({package})"):
        if name in measured:
            return _Session(entry["session"], package, measured[name], True)
    estimate: float = _CHECK
    if package in workspace.packages:
        files = workspace[package].tests.rglob("test_*.py")
        tests = sum(len(re.findall(r"^ *def test_", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in files)
        estimate = _PACKAGE + _TEST_FUNCTION * tests
    return _Session(entry["session"], package, estimate, False)


def _columns(key: tuple[str, str, str, str], sessions: Iterable[_Session]) -> list[Column]:
    """Spread sessions over as few columns as the limit allows: the longest first, each where most time is left."""
    name, python, torch, device = key
    room = LIMIT - _SETUP
    short, parts = [], []
    for session in sessions:
        if session.seconds > room and (session.package is not None or name in _WITH_PYTEST):
            count = math.ceil(session.seconds / room)
            parts += [(session, f"{index}/{count}", session.seconds / count) for index in range(1, count + 1)]
        else:
            short.append(session)
    short.sort(key=lambda session: -session.seconds)
    bins: list[list[_Session]] = []
    for count in range(max(1, math.ceil(_seconds(short) / room)), len(short) + 1):
        bins = [[] for _ in range(count)]
        for session in short:
            min(bins, key=_seconds).append(session)
        if max(map(_seconds, bins)) <= room:
            break
    found = [(tuple(group), "", _seconds(group)) for group in bins]
    found += [((session,), shard, seconds) for session, shard, seconds in parts]
    return [
        Column(
            name=name if len(found) == 1 else f"{name} {index}",
            python=python,
            torch=torch,
            device=device,
            sessions=tuple(sorted(session.name for session in group)),
            shard=shard,
            seconds=_SETUP + seconds,
            measured=all(session.measured for session in group),
        )
        for index, (group, shard, seconds) in enumerate(found, start=1)
    ]


def _seconds(sessions: Iterable[_Session]) -> float:
    return sum(session.seconds for session in sessions)


def text(columns: Sequence[Column]) -> str:
    """Return the plan as text: a line for each column, with its sessions below."""
    lines = [f"{'column':<16} {'python':<6} {'torch':<8} {'device':<6} {'minutes':>7}  sessions"]
    for column in columns:
        minutes = f"{'' if column.measured else '~'}{column.seconds / 60:.0f}"
        shard = f", part {column.shard} of its tests" if column.shard else ""
        lines.append(
            f"{column.name:<16} {column.python:<6} {column.torch:<8} {column.device:<6} {minutes:>7}"
            f"  {len(column.sessions)}{shard}"
        )
        lines += textwrap.wrap(" ".join(column.sessions), 116, initial_indent="    ", subsequent_indent="    ")
    total = sum(column.seconds for column in columns) / 60
    longest = max((column.seconds for column in columns), default=0) / 60
    lines.append(f"{len(columns)} columns, {total:.0f} minutes in all, the longest {longest:.0f}.")
    if not all(column.measured for column in columns):
        lines.append("~: estimated from the number of tests, until `--record` takes seconds from a report of nox.")
    return "\n".join(lines)


def workflow(columns: Iterable[Column]) -> str:
    """Return the plan as outputs of a step of a GitHub workflow: matrices named `cpu`, `nightly` and `cuda`."""
    jobs: dict[str, list[dict[str, str]]] = {"cpu": [], "nightly": [], "cuda": []}
    for column in columns:
        job = column.torch if column.torch == "nightly" else column.device
        sessions = " ".join(f"'{argument}'" for argument in column.command)
        entry = {"column": column.name, "python": column.python, "torch": column.torch, "arguments": sessions}
        jobs[job].append(entry)
    return "\n".join(f"{job}={json.dumps({'include': entries})}" for job, entries in jobs.items())


def record(reports: Iterable[Path], seconds: Path = SECONDS) -> None:
    """Write the times of successful sessions into the file of measured seconds; others stay.

    Args:
        reports: Files that `nox --report` wrote for complete sessions, not for selected tests.
        seconds: The file.
    """
    measured: dict[str, float] = json.loads(seconds.read_text(encoding="utf-8")) if seconds.is_file() else {}
    for report in reports:
        for session in json.loads(report.read_text(encoding="utf-8"))["sessions"]:
            if session["result"] == "success":
                package = session["args"].get("package")
                name = session["name"] if package is None else f"{session['name']}({package})"
                measured[name] = round(session["duration"])
    seconds.write_text(json.dumps(dict(sorted(measured.items())), indent=1) + "\n", encoding="utf-8")


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
    action.add_argument("--record", nargs="+", type=Path, metavar="REPORT", help="take seconds from reports of nox")
    parser.add_argument("base", nargs="?", help="a commit; only what the change since then can affect")
    options = parser.parse_args()
    if options.record:
        try:
            record(options.record)
        except (OSError, ValueError) as error:
            sys.exit(f"`--record` must get reports that `nox --report` wrote: {error}")
        return
    workspace = Workspace()
    measured = json.loads(SECONDS.read_text(encoding="utf-8"))
    try:
        touched = None if options.base is None else workspace.touched(options.base)
    except ValueError as error:
        sys.exit(str(error))
    columns = plan(workspace, listing(workspace), measured, touched)
    print(text(columns) if options.plan else workflow(columns))


if __name__ == "__main__":
    main()
