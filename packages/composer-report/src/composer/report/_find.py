"""Find recorded runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_RECORD = re.compile(r"run-rank(\d+)\.jsonl")
_DEPTH = 3  # levels of folders below the given one
_MOST_FOLDERS = 2000


class RunNotFoundError(FileNotFoundError):
    """A folder has no recorded run."""


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the folders of runs.

    Args:
        folders: Folders of runs, or folders that contain them, up to three levels down.

    Raises:
        RunNotFoundError: One of them has no run.
    """
    runs: list[Path] = []
    for folder in map(Path, folders):
        below = _find_below(folder)
        if not below:
            raise run_not_found(folder)
        runs.extend(path for path in below if path not in runs)
    return runs


def _find_below(folder: Path) -> list[Path]:
    if record_of(folder) is not None or log_of(folder) is not None:
        return [folder]
    runs, level, visited = [], [folder], 0
    for _ in range(_DEPTH):
        level = [child for parent in level if parent.is_dir() for child in parent.iterdir() if child.is_dir()]
        visited += len(level)
        runs += [child for child in level if record_of(child) is not None]
        if runs or visited > _MOST_FOLDERS:
            break
    return sorted(runs, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key: "seed10" after "seed2", and "0.01" before "0.1"."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", str(path))]


def record_of(folder: Path) -> Path | None:
    """Return the record of the lowest rank, or None."""
    if not folder.is_dir():
        return None
    ranks = {}
    for path in folder.iterdir():
        match = _RECORD.fullmatch(path.name)
        if match and path.stat().st_size:
            ranks[int(match[1])] = path
    return ranks[min(ranks)] if ranks else None


def log_of(folder: Path) -> Path | None:
    """Return a text log that has metrics, or None."""
    if not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.txt")):
        with path.open("rb") as file:
            if re.search(rb"^\[(metric\]\[batch=\d+|hyperparameter)\]: ", file.read(65536), re.MULTILINE):
                return path
    return None


def run_not_found(folder: Path) -> RunNotFoundError:
    """Return the error for a folder without a run."""
    if not folder.exists():
        reason = "it does not exist"
    elif not folder.is_dir():
        reason = "it is not a folder"
    else:
        reason = (
            f"neither it nor its subfolders, up to {_DEPTH} levels down, have a `run-rank0.jsonl` with a run, and "
            f"it has no text log of a `FileLogger`"
        )
    return RunNotFoundError(
        f"{str(folder)!r} must be the folder of a run, but {reason}. To record a run, pass "
        f"`loggers=[composer.loggers.RunRecorder('my-run')]` to the `Trainer`, or run `composer-train digits`."
    )
