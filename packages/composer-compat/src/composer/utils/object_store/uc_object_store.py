"""Object stores in volumes of Unity Catalog."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from composer.utils import MissingConditionalImportError
from composer.utils.object_store.object_store import (
    ObjectStore,
    ObjectStoreTransientError,
    check_destination,
    write_parts,
)

_PART = 1 << 20


class UCObjectStore(ObjectStore):
    """A volume of Databricks' Unity Catalog. Needs the extra `databricks` of composer-compat.

    The credentials are those that Databricks' SDK finds, such as `DATABRICKS_HOST` and `DATABRICKS_TOKEN`. Names are
    relative to the volume, or full paths that begin with `Volumes`.

    Args:
        path: `Volumes/<catalog>/<schema>/<volume>`; what follows is not used.

    Attributes:
        prefix: The path of the volume.
        client: The client of Databricks.

    Raises:
        ImportError: `databricks-sdk` is not installed.
        ValueError: The path has another form, or there are no credentials.
    """

    def __init__(self, path: str) -> None:
        try:
            from databricks.sdk import WorkspaceClient
        except ImportError as error:
            raise MissingConditionalImportError("databricks", "databricks-sdk") from error
        self.prefix = self.validate_path(path)
        self.client = WorkspaceClient()  # a ValueError if it finds no credentials

    @staticmethod
    def validate_path(path: str) -> str:
        """Return the part of a path that is the volume.

        Raises:
            ValueError: The path does not begin with `Volumes`, a catalog, a schema and a volume.
        """
        parts = path.strip("/").split("/")
        if parts[0] != "Volumes":
            raise ValueError(f'`path` should start with "Volumes", got {path!r}.')
        if len(parts) < 4 or not all(parts[:4]):
            raise ValueError(f"`path` must be of the form 'Volumes/<catalog>/<schema>/<volume>/...', got {path!r}.")
        return "/".join(parts[:4])

    def get_uri(self, object_name: str) -> str:
        return f"dbfs:{self._path(object_name)}"

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file with options of the SDK's `files.upload`; see `ObjectStore.upload_object`."""
        path, size = self._path(object_name), os.stat(filename).st_size
        with open(filename, "rb") as file, _translated(self.get_uri(object_name)):
            self.client.files.create_directory(path.rpartition("/")[0])
            self.client.files.upload(path, file, overwrite=True, **kwargs)
        if callback is not None:
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        with _translated(self.get_uri(object_name)):
            return int(self.client.files.get_metadata(self._path(object_name)).content_length or 0)

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        check_destination(filename, overwrite)
        uri = self.get_uri(object_name)
        with _translated(uri):
            response = self.client.files.download(self._path(object_name))
            assert response.contents is not None, "the SDK types every answer as optional"
            with response.contents as reply:
                parts = iter(partial(reply.read, _PART), b"")
                write_parts(parts, int(response.content_length or 0), filename, callback, uri)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names, relative to the volume, of the objects that begin with `prefix`, also in folders."""
        root = f"/{self.prefix}/"
        start = self._path(prefix or "")
        folders, found = [start.rpartition("/")[0]], []
        while folders:
            folder = folders.pop()
            try:
                with _translated(f"dbfs:{folder}"):
                    entries = list(self.client.files.list_directory_contents(folder))
            except FileNotFoundError:
                continue
            for entry in entries:
                path = str(entry.path)
                if entry.is_directory:
                    folders.append(path.rstrip("/"))
                elif path.startswith(start):
                    found.append(path.removeprefix(root))
        return sorted(found)

    def _path(self, object_name: str) -> str:
        name = object_name.lstrip("/")
        inside = name == self.prefix or name.startswith(f"{self.prefix}/")
        if not inside and name.startswith("Volumes/"):
            raise ValueError(f"`object_name` must be in the volume {self.prefix!r}, got {object_name!r}.")
        return f"/{name}" if inside else f"/{self.prefix}/{name}"


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Convert the errors of Databricks' SDK to those that an `ObjectStore` raises."""
    from databricks.sdk.errors import NotFound, PermissionDenied
    from databricks.sdk.errors.base import DatabricksError

    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(f"There is no object {uri}.") from error
    except PermissionDenied:
        raise
    except (DatabricksError, ConnectionError, TimeoutError) as error:
        raise ObjectStoreTransientError(f"The request for {uri} failed: {error}") from error
