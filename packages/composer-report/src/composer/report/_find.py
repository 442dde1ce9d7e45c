"""Finds recorded runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from composer.report._errors import RunNotFoundError

__all__ = ["find_runs", "log_of", "nothing_found", "record_of"]

_RECORD = re.compile(r"run-rank(\d+)\.jsonl")
_DEPTH = 3  # levels of folders below the given one
_MOST_FOLDERS = 2000


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The folders of runs.

    Args:
        folders: Folders of runs, or folders that hold folders of runs, up to three levels down.

    Raises:
        RunNotFoundError: One of them holds none.
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        below = _below(folder)
        if not below:
            raise nothing_found(folder)
        found.extend(path for path in below if path not in found)
    return found


def _below(folder: Path) -> list[Path]:
    if record_of(folder) is not None or log_of(folder) is not None:
        return [folder]
    found, level, seen = [], [folder], 0
    for _ in range(_DEPTH):
        level = [child for parent in level for child in _folders(parent)]
        seen += len(level)
        found += [child for child in level if record_of(child) is not None]
        if found or seen > _MOST_FOLDERS:
            break
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts "seed10" behind "seed2", and "0.01" before "0.1"."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", str(path))]


def _folders(parent: Path) -> list[Path]:
    return [child for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []


def record_of(folder: Path) -> Path | None:
    """The record of the lowest rank; None: there is none."""
    if not folder.is_dir():
        return None
    ranks = {}
    for path in folder.iterdir():
        match = _RECORD.fullmatch(path.name)
        if match and path.stat().st_size:
            ranks[int(match[1])] = path
    return ranks[min(ranks)] if ranks else None


def log_of(folder: Path) -> Path | None:
    """A text log with metrics in it; None: there is none."""
    if not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.txt")):
        with path.open("rb") as file:
            if re.search(rb"^\[(metric\]\[batch=\d+|hyperparameter)\]: ", file.read(65536), re.MULTILINE):
                return path
    return None


def nothing_found(folder: Path) -> RunNotFoundError:
    """The error for a folder without a run."""
    if not folder.exists():
        what = "there is no such folder"
    elif not folder.is_dir():
        what = "it is no folder"
    else:
        what = (
            f"neither it nor the folders in it, up to {_DEPTH} levels down, hold a `run-rank0.jsonl` with a run, and "
            f"it holds no text log of a `FileLogger`"
        )
    return RunNotFoundError(
        f"{str(folder)!r} must be the folder of a run, but {what}. To record a run, pass "
        f"`loggers=[composer.loggers.RunRecorder('my-run')]` to the `Trainer`, or run `composer-train digits`."
    )
