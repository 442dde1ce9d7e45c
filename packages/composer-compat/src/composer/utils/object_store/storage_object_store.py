"""Object stores through fsspec."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from composer.checkpoint.storage import Storage, direct_storage
from composer.utils.object_store.object_store import ObjectStore, check_destination


class StorageObjectStore(ObjectStore):
    """An object store in a `Storage`, which retries transient failures and checks that files arrive completely.

    If all attempts fail, that is an `ObjectStoreTransientError`; any other failure is an OSError.

    Args:
        storage: The bucket, or the folder in one.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r})"

    def get_uri(self, object_name: str) -> str:
        return self.storage.uri(object_name)

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file; see `ObjectStore.upload_object`. This kind of store has no options.

        Raises:
            OSError: It cannot be uploaded.
            ValueError: An option is given.
        """
        if kwargs:
            raise ValueError(f"`{type(self).__name__}.upload_object` has no option {', '.join(map(repr, kwargs))}.")
        with self._explaining():
            self.storage.upload(filename, object_name, False if callback is None else callback)

    def get_object_size(self, object_name: str) -> int:
        with self._explaining():
            return self.storage.size(object_name)

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        check_destination(filename, overwrite)
        with self._explaining():
            self.storage.download(object_name, filename, False if callback is None else callback)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names of the objects that begin with `prefix`, including those in subfolders."""
        return self.storage.find(prefix or "")

    def _explaining(self) -> AbstractContextManager[None]:
        """Return a context for requests for an object, in which a subclass may raise other errors than fsspec's."""
        return nullcontext()


class FsspecObjectStore(StorageObjectStore):
    """A bucket, or a folder in one, of any store that fsspec knows.

    Args:
        uri: The bucket or folder, such as `az://container/folder` or `memory://bucket`; names are relative to it.
        **options: Options of fsspec's filesystem.

    Raises:
        ModuleNotFoundError: The package that serves this kind of store is not installed.
        ValueError: No kind of store has this scheme.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp(), "readme")
        >>> _ = file.write_text("hello")
        >>> with FsspecObjectStore("memory://bucket") as store:
        ...     store.upload_object("folder/readme", file)
        ...     store.list_objects("folder/")
        ['folder/readme']
    """

    def __init__(self, uri: str, **options: Any) -> None:
        super().__init__(direct_storage(uri, **options))


def bucket_name(bucket: str) -> str:
    """Return the name of a bucket without slashes around it.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, or holds a scheme or a folder.
    """
    if not isinstance(bucket, str):
        raise TypeError(f"`bucket` must be a string, the name of a bucket, got {bucket!r}.")
    name = bucket.strip("/")
    if not name or "/" in name:
        raise ValueError(f"`bucket` must be the name of a bucket, got {bucket!r}. Pass a folder in it as `prefix`.")
    return name


def as_folder(prefix: str) -> str:
    """Return a prefix as the name of a folder: without a leading slash, with one at its end; "" remains."""
    prefix = prefix.strip("/")
    return f"{prefix}/" if prefix else ""
