"""Storages in object stores, so that checkpoints are saved to and loaded from any `ObjectStore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.checkpoint.storage import Connection, Storage, split_uri
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.remote_paths import BACKEND_TO_OBJECT_STORE_FACTORY


def storage_of_registered(uri: str, folder: str, inside: str) -> Storage | None:
    """Return the storage of a folder in the store that `BACKEND_TO_OBJECT_STORE_FACTORY` makes for the URI's scheme.

    Args:
        uri: The URI of something in the store.
        folder: The URI of the folder.
        inside: The folder in the store.

    Returns:
        The storage; None if no function serves the scheme.
    """
    scheme, bucket, path = split_uri(uri)
    factory = BACKEND_TO_OBJECT_STORE_FACTORY.get(scheme)
    if factory is None:
        return None
    made = factory(bucket, path)
    storage = getattr(made, "storage", None)
    if isinstance(storage, Storage):
        return storage.to_folder(inside)
    unused = [made]
    return storage_in(lambda: unused.pop() if unused else factory(bucket, path), folder, inside)


def storage_in(open_store: Callable[[], ObjectStore], uri: str, path: str = "") -> Storage:
    """Return the storage of a folder in an object store.

    Args:
        open_store: Returns the store; called in each thread and process.
        uri: The URI of the folder, for messages.
        path: The folder in the store.
    """
    root = path.strip("/")

    def connect() -> tuple[Any, str]:
        from composer.utils.object_store.store_filesystem import ObjectStoreFileSystem  # fsspec costs 0.2 s

        return ObjectStoreFileSystem(open_store()), root

    folder = uri if "://" in uri else uri.replace(":", "://", 1)
    return Storage(folder, {}, connection=Connection(connect, is_object_store=True))
