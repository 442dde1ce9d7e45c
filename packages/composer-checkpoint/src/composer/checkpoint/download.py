"""Bringing checkpoints to this machine."""

from __future__ import annotations

import os

from composer.checkpoint._get_file import get_file
from composer.checkpoint._ranks import on_first_rank

__all__ = ["download_monolithic_checkpoint"]


def download_monolithic_checkpoint(
    source_uri: str, destination_path: str | os.PathLike[str], global_rank_zero_only: bool = True
) -> None:
    """Bring a checkpoint of one file to a local path. To be called on every rank; all return when it is there.

    Args:
        source_uri: A URI, such as `s3://bucket/run/model.pt`, or a local path, which is linked to.
        destination_path: The file to make.
        global_rank_zero_only: Whether only rank 0 fetches it; otherwise the first rank of every node does.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: `destination_path` exists.
        RuntimeError: The rank that fetches it failed; on that one, its own error is raised.
    """
    on_first_rank(lambda: get_file(source_uri, destination_path), each_node=not global_rank_zero_only)
