"""Helpers of the parts of a profiler: the profiler of a run, and names and uploads of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from composer.core import State, Timestamp
from composer.loggers import Logger
from composer.utils import format_name_with_dist, format_name_with_dist_and_time

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler


def profiler_of(state: State, who: str) -> Profiler:
    """Return the profiler of a run.

    Raises:
        RuntimeError: The run has no profiler.
    """
    if state.profiler is None:
        raise RuntimeError(
            f"`{who}` works with a profiler, but `state.profiler` is None. Do not pass it as a callback; pass "
            f"`Trainer(profiler=Profiler(...))`."
        )
    return cast("Profiler", state.profiler)


def path_of(state: State, folder: str, filename: str) -> Path:
    """Return the path of a file that is written now, and create its folder."""
    path = Path(
        format_name_with_dist(folder, state.run_name),
        format_name_with_dist_and_time(filename, state.run_name, state.timestamp),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def upload(state: State, logger: Logger, remote_file_name: str | None, path: Path, overwrite: bool) -> None:
    """Pass a file to the loggers that store files, unless `remote_file_name` is None."""
    if remote_file_name is None or not logger.has_file_upload_destination():
        return
    name = format_name_with_dist_and_time(remote_file_name, state.run_name, state.timestamp).lstrip("/")
    logger.upload_file(name, os.fspath(path), overwrite=overwrite)


def remove_old(saved: list[tuple[Timestamp, list[Path]]], keep: int, removable: Sequence[Path] | None = None) -> None:
    """Remove all but the newest saved traces and their files.

    Args:
        saved: The time and the files of each trace, oldest first.
        keep: The number of traces to keep; -1 keeps all.
        removable: The files that this rank may remove; None: all.
    """
    while 0 <= keep < len(saved):
        _, paths = saved.pop(0)
        for path in paths:
            if removable is None or path in removable:
                path.unlink(missing_ok=True)
