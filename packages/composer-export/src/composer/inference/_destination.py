"""Taking the files of an exported model to where they are wanted, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.checkpoint.durable import scratch_folder, sync_folder, temporary_path
from composer.checkpoint.storage import storage_of
from composer.inference._formats import ExportFormat
from composer.utils import is_uri

__all__ = ["check_destination", "deliver"]


def check_destination(save_format: ExportFormat, save_path: str | os.PathLike[str], save_object_store: Any) -> str:
    """The path, if something can be saved there.

    Args:
        save_format: As in `export_for_inference`.
        save_path: Likewise.
        save_object_store: Likewise.

    Raises:
        TypeError: It is no object store.
        ValueError: The path has no name, or no kind of store has its scheme.
        ModuleNotFoundError: The package that serves this kind of store is not installed.
    """
    text = os.fspath(save_path) if save_object_store is not None else os.path.expanduser(save_path)
    if text[-1:] in ("", "/") or Path(text).is_dir():
        raise ValueError(f"`save_path` must be the path of a file, got {text!r}. Append a name, such as 'model.pt2'.")
    if save_format is ExportFormat.TORCH_EXPORT and not text.endswith(".pt2"):
        raise ValueError(f"`save_path` must end in '.pt2', which `torch.export.load` asks for, got {text!r}.")
    if save_object_store is not None:
        if not hasattr(save_object_store, "upload_object"):
            raise TypeError(
                f"`save_object_store` must have a method `upload_object`, got {save_object_store!r}. Pass an object "
                f"store, or leave it out and pass a URI as `save_path`."
            )
    elif is_uri(text):
        storage_of(text.rpartition("/")[0])
    return text


def deliver(write: Callable[[Path], None], save_path: str, save_object_store: Any) -> list[Path]:
    """Write files, and take them to where they are wanted when they are whole: the one that is opened comes last.

    Args:
        write: Writes a file of the given path, and perhaps others into its folder.
        save_path: A local path, a URI, or a name in the object store.
        save_object_store: An object store.

    Returns:
        The files, if they are on this machine.
    """
    folder, _, name = save_path.rpartition("/")
    if save_object_store is not None:
        prefix = f"{folder}/" if folder else ""

        def put(file: Path) -> None:
            save_object_store.upload_object(object_name=f"{prefix}{file.name}", filename=str(file))

    elif is_uri(save_path):
        storage = storage_of(folder)

        def put(file: Path) -> None:
            storage.upload(file, file.name)

    else:
        return _write_here(write, Path(save_path))
    with scratch_folder("export") as scratch:
        file = scratch / name
        write(file)
        for each in _main_last(file):
            put(each)
    return []


def _write_here(write: Callable[[Path], None], target: Path) -> list[Path]:
    """Write into a folder beside the file, and move what is there: each file is replaced by a whole one only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = temporary_path(target)
    scratch.mkdir()
    try:
        write(scratch / target.name)
        files = _main_last(scratch / target.name)
        for each in files:
            with each.open("rb+") as written:
                os.fsync(written.fileno())
            os.replace(each, target.with_name(each.name))
        sync_folder(target.parent)
        return [target.with_name(each.name) for each in files]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _main_last(file: Path) -> list[Path]:
    return sorted(file.parent.iterdir(), key=lambda each: (each == file, each.name))
