"""Reading a checkpoint as plain data, without a run to load it into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.checkpoint._container import read_file
from composer.checkpoint._get_file import get_file
from composer.checkpoint._ranks import on_each_node
from composer.checkpoint._sharded_run import download_run, fill_shards, is_sharded_run, read_run
from composer.utils import is_uri

__all__ = ["fetch", "read_checkpoint", "read_local"]


def read_checkpoint(path: str | os.PathLike[str], keys: Sequence[str] | None = None) -> Any:
    """Read a checkpoint onto the CPU, running no code from it. To be called on every rank.

    Args:
        path: Its path or URI: a file of any format that the Trainer writes, or a folder of shards.
        keys: What is wanted of its entry `state`, such as `["model"]`; None: all. What is in shards and not wanted is
            not read.

    Returns:
        What was saved, with whole tensors: for a checkpoint of a run `{"state": {"model": {...}, ...}, "rng": [...]}`.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: It is torn, truncated or altered.
        UnsafeCheckpointError: It holds types whose loading could run code.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        ...     torch.save({"state": {"model": {"weight": torch.ones(2)}, "run_name": "a"}}, file.name)
        ...     read_checkpoint(file.name, keys=["model"])
        {'state': {'model': {'weight': tensor([1., 1.])}}}
    """
    text = os.path.expanduser(os.fspath(path))
    if not is_uri(text):
        return read_local(Path(text), keys)
    with on_each_node(lambda folder: fetch(text, folder / Path(text).name)) as folder:
        return read_local(folder / Path(text).name, keys)


def fetch(uri: str, target: Path) -> None:
    """Bring a checkpoint, a file or a folder of shards, to a local path."""
    if not download_run(uri, target, progress_bar=False):
        get_file(uri, target)


def read_local(path: Path, keys: Sequence[str] | None = None) -> Any:
    """`read_checkpoint` of a local path; not a collective operation."""
    in_shards = is_sharded_run(path)
    content = (read_run if in_shards else read_file)(path)[0]
    state = content.get("state") if isinstance(content, dict) else None
    if keys is not None and isinstance(state, dict):
        content["state"] = {key: state[key] for key in keys if key in state}
    return fill_shards(content, {}) if in_shards else content
