"""A filesystem of fsspec over an object store, so that a `Storage` can be in any `ObjectStore`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK

from composer.checkpoint.storage import report_to
from composer.utils.object_store.object_store import ObjectStore


class ObjectStoreFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads and writes whole objects. An object store has no method that removes objects.

    Args:
        store: The store; paths are its names.
    """

    cachable = False
    protocol = "object-store"

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self.store = store

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size and type of an object."""
        return {"name": path, "size": self.store.get_object_size(path), "type": "file"}

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any) -> list[str]:
        """List the objects in a folder and its subfolders."""
        prefix = f"{path.rstrip('/')}/" if path.strip("/") else ""
        # Stores may list full names or relative ones: both have the same URI.
        start = self.store.get_uri(f"{prefix}_").removesuffix("_")
        uris = (self.store.get_uri(name) for name in self.store.list_objects(prefix))
        return sorted(f"{prefix}{uri.removeprefix(start)}" for uri in uris if uri.startswith(start))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return the content of an object, or a part of it; all of it is downloaded."""
        with tempfile.TemporaryDirectory(prefix="composer-object-") as folder:
            file = Path(folder) / "object"
            self.store.download_object(object_name=path, filename=str(file), overwrite=True)
            return file.read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """Write an object."""
        with tempfile.TemporaryDirectory(prefix="composer-object-") as folder:
            file = Path(folder) / path.rpartition("/")[2]
            file.write_bytes(value)
            self.store.upload_object(object_name=path, filename=str(file))

    def get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **kwargs: Any) -> None:
        """Download an object."""
        self.store.download_object(object_name=rpath, filename=lpath, overwrite=True, callback=report_to(callback))

    def put_file(self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, **kwargs: Any) -> None:
        """Upload a file."""
        self.store.upload_object(object_name=rpath, filename=lpath, callback=report_to(callback))
