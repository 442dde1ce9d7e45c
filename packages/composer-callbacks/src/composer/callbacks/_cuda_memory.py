"""Recording and showing what CUDA memory is used for."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from composer.loggers import Logger
from composer.utils import plain_int

__all__ = ["number_of_entries", "record", "stop", "take", "upload", "write_page", "write_pickle"]


def number_of_entries(max_entries: SupportsIndex) -> int:
    """The number of events to keep, as a plain int.

    Args:
        max_entries: At least 1.

    Raises:
        ValueError: It is not.
    """
    number = plain_int(max_entries)
    if number is None or number < 1:
        raise ValueError(f"`max_entries` must be at least 1 event, got {max_entries!r}. Use 100000.")
    return number


_recording: list[int] = []  # how many entries each of those who record wants


def record(max_entries: int) -> None:
    """Record allocations from now on, with where they come from; at least the last `max_entries` are kept."""
    _recording.append(max_entries)
    torch.cuda.memory._record_memory_history("all", max_entries=max(_recording))


def stop(max_entries: int) -> None:
    """End what `record` began; once nobody else records, torch stops, and forgets what it recorded."""
    _recording.remove(max_entries)
    if not _recording:
        torch.cuda.memory._record_memory_history(None)


def take() -> Mapping[str, Any]:
    """What was recorded, and what is allocated now."""
    snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def write_pickle(snapshot: Mapping[str, Any], path: Path) -> Path:
    """Write a snapshot for https://pytorch.org/memory_viz."""
    path.write_bytes(pickle.dumps(snapshot))
    return path


def write_page(snapshot: Mapping[str, Any], path: Path, plot: Callable[[Any], str]) -> Path:
    """Write what a function of `torch.cuda._memory_viz` makes of a snapshot."""
    path.write_text(plot(snapshot), encoding="utf-8")
    return path


def upload(logger: Logger, remote_file_name: str | None, path: Path, overwrite: bool) -> None:
    """Hand a file to the loggers that store files, under a name of their own.

    Args:
        logger: Reaches the loggers.
        remote_file_name: The name; None: not at all.
        path: The local file.
        overwrite: Whether to replace what they have under that name.
    """
    if remote_file_name is not None and logger.has_file_upload_destination():
        logger.upload_file(remote_file_name.lstrip("/"), os.fspath(path), overwrite=overwrite)
