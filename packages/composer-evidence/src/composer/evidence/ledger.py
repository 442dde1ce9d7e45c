"""The ledger: append-only lines of JSON, one for each run, entry and environment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.evidence.task import digest

PUBLISHED = Path(__file__).parent / "published"
"""The folder of the ledger that comes with this package."""

_FILE = "ledger.jsonl"


class LedgerError(ValueError):
    """A ledger was changed, or an entry does not exist."""


class Ledger:
    """The file `ledger.jsonl` in a folder.

    Every line is a JSON object with a `kind` ("run", "entry" or "environment") and an `id`, a hash of the other values,
    so changed lines are refused. Lines are appended in one write, under a lock, and are on the disk when `add` returns;
    a line that a kill truncated is ignored. The environment of runs (versions, hardware) is a separate line, to which
    the lines of runs refer.

    Args:
        folder: The folder; made when the first line is added.

    Raises:
        LedgerError: A line was changed.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE
        self._lines: dict[str, dict[str, Any]] = {}
        self._read_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that this and other processes have added since the last read.

        Raises:
            LedgerError: A line was changed.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        for text in complete.splitlines():
            line = _parse(text)
            if line is not None:
                self._lines[line["id"]] = line

    def add(self, kind: str, values: Mapping[str, Any]) -> str:
        """Append a line, unless the ledger has it already.

        Args:
            kind: "run" or "entry".
            values: The values, for JSON.

        Returns:
            Its id.
        """
        if kind not in ("run", "entry"):
            raise ValueError(f"`kind` must be 'run' or 'entry', got {kind!r}.")
        lines = []
        if kind == "run" and "environment" in values:
            lines.append(_line("environment", values["environment"]))
            values = {**values, "environment": lines[0]["id"]}
        lines.append(_line(kind, values))
        self._append(lines)
        return str(lines[-1]["id"])

    def add_lines(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """Append lines of other ledgers that this one does not have, and return their number."""
        return self._append([dict(line) for line in lines])

    def _append(self, lines: Sequence[dict[str, Any]]) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path) as file:
            self.refresh()
            new = {line["id"]: line for line in lines if line["id"] not in self._lines}
            if new:
                texts = [json.dumps(line, sort_keys=True, separators=(",", ":")) for line in new.values()]
                torn = b"\n" if os.fstat(file).st_size > self._read_bytes else b""  # ends a line that a kill cut off
                os.write(file, torn + "".join(f"{text}\n" for text in texts).encode("utf-8"))
                os.fsync(file)
                self.refresh()
        return len(new)

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield all lines of a kind, in the order in which they were added."""
        return (self._whole(line) for line in list(self._lines.values()) if line["kind"] == kind)

    def _whole(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return a line with the environment to which it refers."""
        place = self._lines.get(str(line.get("environment")))
        if place is None:
            return line
        return {**line, "environment": {key: value for key, value in place.items() if key not in ("kind", "id")}}

    def raw_lines(self) -> list[dict[str, Any]]:
        """Return all lines as they are in the file."""
        return list(self._lines.values())

    def entries(self, about: str | None = None, task: str | None = None) -> list[dict[str, Any]]:
        """Return entries, oldest first.

        Args:
            about: Only entries about this: "tuning", "measurement", ... None: all.
            task: Only entries of this task. None: of all tasks.
        """
        found = self.lines("entry")
        return [e for e in found if about in (None, e.get("about")) and task in (None, e.get("task"))]

    def entry(self, name: str) -> dict[str, Any]:
        """Return an entry by its id, or by the beginning of it.

        Raises:
            LedgerError: No entry, or more than one, has this id.
        """
        found = [entry for entry in self.lines("entry") if name and entry["id"].startswith(name)]
        if len(found) != 1:
            known = ", ".join(entry["id"] for entry in self.lines("entry")) or "none"
            raise LedgerError(f"`entry` must be the id of one entry of {self.path}, got {name!r}. It has {known}.")
        return found[0]


def merge(ledger: Ledger, folders: Iterable[Path]) -> int:
    """Add the lines of other ledgers, such as those of shards.

    Args:
        ledger: The ledger to add to.
        folders: The folders of the others.

    Returns:
        The number of new lines.

    Raises:
        LedgerError: A folder has no ledger, or a line was changed.
    """
    lines = []
    for folder in folders:
        other = Ledger(folder)
        if not other.path.exists():
            raise LedgerError(f"`folders` must have a ledger each, got {str(folder)!r} without {_FILE}.")
        lines += other.raw_lines()
    return ledger.add_lines(lines)


def _line(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(json.dumps({"kind": kind, **values}, allow_nan=False))
    line["id"] = digest({key: value for key, value in line.items() if key != "id"})
    return line


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return a line, or None if a kill truncated it."""
    try:
        line: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    if line.get("id") != digest({key: value for key, value in line.items() if key != "id"}):
        raise LedgerError(
            f"Lines of a ledger must not change, but that of {line.get('id')!r} did. Restore it, or remove the line "
            f"and measure again."
        )
    return line


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file for appending, under a lock that other processes respect."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)
