"""What the parts of a profiler share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from composer.core import State, Timestamp
from composer.loggers import Logger
from composer.utils import format_name_with_dist, format_name_with_dist_and_time, plain_int

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler

__all__ = ["number_to_keep", "numbered", "numbered_name", "path_of", "profiler_of", "remove_old", "upload"]


def profiler_of(state: State, who: str) -> Profiler:
    """The profiler of a run.

    Raises:
        RuntimeError: The run has none.
    """
    if state.profiler is None:
        raise RuntimeError(
            f"`{who}` works with a profiler, but `state.profiler` is None. Do not pass it as a callback; pass "
            f"`Trainer(profiler=Profiler(...))`."
        )
    return cast("Profiler", state.profiler)


def number_to_keep(num_traces_to_keep: Any) -> int:
    """A number of traces to keep, as a plain int.

    Raises:
        ValueError: It is below -1.
    """
    number = plain_int(num_traces_to_keep)
    if number is None or number < -1:
        raise ValueError(f"`num_traces_to_keep` must be at least 0, or -1 for all, got {num_traces_to_keep!r}.")
    return number


def path_of(state: State, folder: str, filename: str) -> Path:
    """The path of a file written now; its folder is made."""
    path = Path(
        format_name_with_dist(folder, state.run_name),
        format_name_with_dist_and_time(filename, state.run_name, state.timestamp),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def numbered_name(name: str, number: int) -> str:
    """A file name with a number before its ending, unless that is 0: of files written at the same training time."""
    root, ending = os.path.splitext(name)
    return f"{root}.{number}{ending}" if number else name


def numbered(path: Path, number: int) -> Path:
    """A path whose file name is so numbered."""
    return path.with_name(numbered_name(path.name, number))


def upload(state: State, logger: Logger, remote_file_name: str | None, path: Path, overwrite: bool) -> None:
    """Hand a file to the loggers that store files; None: not."""
    if remote_file_name is None or not logger.has_file_upload_destination():
        return
    name = format_name_with_dist_and_time(remote_file_name, state.run_name, state.timestamp).lstrip("/")
    logger.upload_file(name, os.fspath(path), overwrite=overwrite)


def remove_old(saved: list[tuple[Timestamp, list[Path]]], keep: int, mine: Sequence[Path] | None = None) -> None:
    """Forget all but the newest saved traces, and remove their files.

    Args:
        saved: The traces, oldest first, with their files.
        keep: How many to keep; -1 is all.
        mine: The files that may be removed, of others' too; None: all.
    """
    while 0 <= keep < len(saved):
        _, paths = saved.pop(0)
        for path in paths:
            if mine is None or path in mine:
                path.unlink(missing_ok=True)
