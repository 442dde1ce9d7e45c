"""Taking checkpoints to where they are kept."""

from __future__ import annotations

import os
from pathlib import Path

from composer.checkpoint._storage import storage_of

__all__ = ["upload_file"]


def upload_file(
    source_path: str | os.PathLike[str],
    dest_dir: str,
    *,
    overwrite: bool = False,
    symlink_name: str | None = None,
) -> str:
    """Copy a file to a folder of a remote store, or of this machine. Returns when it is there as a whole.

    What fails for a moment is tried again.

    Args:
        source_path: The file.
        dest_dir: The folder: a URI, such as `s3://bucket/run`, or a local path.
        overwrite: Whether a file of this name is replaced.
        symlink_name: The name of a text file beside it that stands for the newest upload; it is written last, and
            readers such as `load_path` follow it. Its name must end in `.symlink`.

    Returns:
        The URI of the uploaded file.

    Raises:
        FileNotFoundError: There is no file `source_path`.
        FileExistsError: The store has a file of this name, and `overwrite` is False.
        StorageError: The store cannot be written, after several attempts.
        ValueError: `symlink_name` has another ending.
    """
    source = Path(source_path).expanduser()
    if symlink_name is not None and not symlink_name.endswith(".symlink"):
        raise ValueError(f"`symlink_name` must end in '.symlink', got {symlink_name!r}.")
    if not source.is_file():
        raise FileNotFoundError(f"There is no file {str(source)!r} to upload.")
    storage = storage_of(dest_dir)
    if not overwrite and storage.exists(source.name):
        raise FileExistsError(f"{storage.uri(source.name)} already exists. Pass `overwrite=True` to replace it.")
    storage.upload(source, source.name)
    if symlink_name is not None:
        storage.write_text(symlink_name, source.name)
    return storage.uri(source.name)
