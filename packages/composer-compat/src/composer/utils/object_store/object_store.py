"""The interface of object stores: what a run needs from a bucket of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from composer.checkpoint.durable import replacing
from composer.checkpoint.storage import ObjectStoreTransientError as ObjectStoreTransientError
from composer.utils.reference_helpers import iterate_with_callback

__all__ = ["ObjectStore", "ObjectStoreTransientError"]

T = TypeVar("T", bound="ObjectStore")


class ObjectStore:
    """A bucket of files, or a folder in one. Names are relative to it, with "/" between folders.

    To support another store, override the methods that are needed: reading a file needs `download_object`, by a URI
    also `get_object_size`; saving a run needs all of them. Raise `ObjectStoreTransientError` where another attempt may
    succeed, and FileNotFoundError for a missing object. The constructor of this class does nothing.
    """

    def get_uri(self, object_name: str) -> str:
        """Return the URI of an object, which need not exist."""
        self._refuse("get_uri")

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file, replacing an object of this name.

        Args:
            object_name: The name of the object.
            filename: The path of the file.
            callback: Called with the bytes done and the total.
            **kwargs: Options of the store.

        Raises:
            ObjectStoreTransientError: Another attempt may succeed.
        """
        self._refuse("upload_object")

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectStoreTransientError: Another attempt may succeed.
        """
        self._refuse("get_object_size")

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        """Download an object. The file is complete or not there.

        Args:
            object_name: The name of the object.
            filename: The path to write to; its folder is created if necessary.
            overwrite: Replace an existing file.
            callback: Called with the bytes done and the total.

        Raises:
            FileExistsError: `filename` exists, and `overwrite` is False.
            FileNotFoundError: There is no such object.
            ObjectStoreTransientError: Another attempt may succeed.
        """
        self._refuse("download_object")

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the names of the objects that begin with `prefix`, including those in subfolders."""
        self._refuse("list_objects")

    def close(self) -> None:
        """Release connections."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse(self, method: str) -> NoReturn:
        raise NotImplementedError(f"`{type(self).__name__}` has no method `{method}`. Override it to use it.")


def check_destination(filename: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that a file may be written.

    Raises:
        FileExistsError: It exists, and `overwrite` is False.
    """
    if not overwrite and os.path.lexists(filename):
        raise FileExistsError(
            f"`filename` {str(filename)!r} already exists, and overwrite is set to False. Pass `overwrite=True` to "
            f"replace it."
        )


def write_parts(
    parts: Iterable[bytes],
    size: int,
    filename: str | os.PathLike[str],
    callback: Callable[[int, int], None] | None,
    uri: str,
) -> None:
    """Write a file that is complete or not there.

    Args:
        parts: The content.
        size: The number of bytes.
        filename: The file to write; its folder is created if necessary.
        callback: As for `ObjectStore.download_object`.
        uri: The URI of the object, for the message.

    Raises:
        ObjectStoreTransientError: There are fewer or more bytes.
    """
    target = Path(filename)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary, temporary.open("wb") as file:
        for part in iterate_with_callback(parts, size, callback):
            file.write(part)
        if file.tell() != size:
            raise ObjectStoreTransientError(f"{file.tell()} of {size} bytes of {uri} arrived.")
