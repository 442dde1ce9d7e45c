"""Checkpoints in shards, as `torch.distributed.checkpoint` writes and reads them: one folder, written by all ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.checkpoint._durable import sync_folder, temporary_path
from composer.checkpoint._ranks import on_first_rank
from composer.checkpoint._seal import CorruptCheckpointError
from composer.utils import dist

__all__ = ["is_shard_folder", "names_of_shards", "read_shards", "write_shards"]

_INDEX = ".metadata"  # torch writes it last


def is_shard_folder(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in shards."""
    return (folder / _INDEX).is_file()


def write_shards(state_dict: dict[str, Any], folder: Path, overwrite: bool) -> None:
    """Write a checkpoint in shards: whole, or not at all. A collective operation.

    Args:
        state_dict: Each rank's part.
        folder: The folder to make.
        overwrite: Whether an existing one is replaced.

    Raises:
        FileExistsError: The folder exists, and `overwrite` is False.
        OSError: It cannot be written.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    def check() -> None:
        if folder.exists() and not overwrite:
            raise FileExistsError(f"{str(folder)!r} already exists. Pass `overwrite=True` to replace it.")
        folder.parent.mkdir(parents=True, exist_ok=True)

    on_first_rank(check)
    temporary = Path(dist.all_gather_object(str(temporary_path(folder)))[0])
    try:
        with _without_noise():
            save(state_dict, checkpoint_id=temporary)
        on_first_rank(lambda: _rename(temporary, folder))
    finally:
        if dist.get_global_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def names_of_shards(folder: Path) -> set[str]:
    """The names of what a checkpoint in shards has."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return {*FileSystemReader(folder).read_metadata().state_dict_metadata}


def read_shards(state_dict: dict[str, Any], folder: Path, planner: Any = None) -> None:
    """Fill tensors with what a checkpoint in shards has under their names. A collective operation.

    Args:
        state_dict: What to fill.
        folder: The folder.
        planner: A planner of torch that maps names and tensors.

    Raises:
        CorruptCheckpointError: The folder's index or a file of it is missing or damaged.
        RuntimeError: The checkpoint has no such names, or tensors of other shapes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    if not is_shard_folder(folder):
        raise CorruptCheckpointError(folder, f"it lacks the index {_INDEX!r}, which is written last")
    try:
        with _without_noise():
            load(state_dict, checkpoint_id=folder, planner=planner)
    except CheckpointException as error:  # no Exception, but told as one
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise RuntimeError(f"The shards in {str(folder)!r} could not be loaded: {causes}") from error


def _rename(temporary: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    sync_folder(temporary)
    os.replace(temporary, folder)
    sync_folder(folder.parent)


@contextmanager
def _without_noise() -> Iterator[None]:
    """A single process is meant; torch takes it for a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (unavailable|disabled)", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
