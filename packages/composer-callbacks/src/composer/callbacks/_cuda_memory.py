"""Recording and writing the history of CUDA memory."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from composer.core import State
from composer.loggers import Logger


def check_gpu(state: State, name: str) -> bool:
    """Return True if the run is on a CUDA device; otherwise warn that a callback has no effect."""
    if state.device.name == "gpu":
        return True
    warnings.warn(
        f"`{name}` only works on CUDA devices, but the model is on {state.device.name!r}. It will have no effect.",
        stacklevel=3,
    )
    return False


def check_absent(path: Path, name: str) -> None:
    """Raise FileExistsError if a file that a callback would write exists."""
    if path.exists():
        raise FileExistsError(
            f"`{name}` would replace {path}, which another run wrote. Pass `overwrite=True` to allow that, or another "
            f"`folder`."
        )


_recordings: list[int] = []  # `max_entries` of the active recordings; torch has one recorder per process


def record(max_entries: int) -> None:
    """Start to record allocations and their stack traces; at least the last `max_entries` are stored."""
    _recordings.append(max_entries)
    torch.cuda.memory._record_memory_history("all", max_entries=max(_recordings))


def stop(max_entries: int) -> None:
    """Stop a recording. The recorder of torch stops, and drops its entries, with the last recording."""
    _recordings.remove(max_entries)
    if not _recordings:
        torch.cuda.memory._record_memory_history(None)


def write(snapshot: Mapping[str, Any], path: Path, plot: Callable[[Any], str] | None = None) -> Path:
    """Write a snapshot as a pickle for https://pytorch.org/memory_viz, or as a plot of `torch.cuda._memory_viz`."""
    if plot is None:
        path.write_bytes(pickle.dumps(snapshot))
    else:
        path.write_text(plot(snapshot), encoding="utf-8")
    return path


def upload(logger: Logger, remote_file_name: str | None, path: Path, overwrite: bool) -> None:
    """Pass a file to the loggers that store files, unless `remote_file_name` is None."""
    if remote_file_name is not None and logger.has_file_upload_destination():
        logger.upload_file(remote_file_name.lstrip("/"), os.fspath(path), overwrite=overwrite)
