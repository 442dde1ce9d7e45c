"""Object stores: buckets of files, through fsspec."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from composer.checkpoint.storage import ObjectStoreTransientError, storage_of
from composer.utils import parse_uri

__all__ = [
    "GCSObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "maybe_create_object_store_from_uri",
]

T = TypeVar("T", bound="ObjectStore")
_SCHEMES = frozenset("abfs abfss az azure file gcs gs memory oci oss s3 s3a sftp ssh".split())


class ObjectStore:
    """A bucket, or a folder in one, of any store that fsspec knows.

    Args:
        uri: The bucket or folder, such as `s3://bucket/folder` or `sftp://user@host/folder`; names are relative to it.
        **options: Options of fsspec's filesystem.

    Raises:
        ModuleNotFoundError: The package that serves this kind of store is not installed.
        ValueError: No kind of store has this scheme.

    Example:
        >>> with ObjectStore("memory://bucket") as store:
        ...     store.upload_object("folder/readme", __file__)
        ...     store.list_objects("folder/")
        ['folder/readme']

    Differs: transient failures are retried here. If all attempts fail, that is an `ObjectStoreTransientError`; any
    other
        failure is an `OSError`.
    """

    def __init__(self, uri: str, **options: Any) -> None:
        self._storage = storage_of(uri, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._storage!r})"

    def get_uri(self, object_name: str) -> str:
        """Return the URI of an object."""
        return self._storage.uri(object_name)

    def upload_object(
        self, object_name: str, filename: str | os.PathLike[str], callback: Callable[[int, int], None] | None = None
    ) -> None:
        """Upload a file, replacing an object of this name.

        Args:
            object_name: The name of the object.
            filename: The path of the file.
            callback: Called with the bytes done and the bytes in all.

        Raises:
            OSError: It cannot be uploaded.
        """
        self._storage.upload(filename, object_name, False if callback is None else callback)

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self._storage.size(object_name)

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        """Download an object.

        Args:
            object_name: The name of the object.
            filename: The path to write to; the file is complete or not there.
            overwrite: Replace an existing file.
            callback: Called with the bytes done and the bytes in all.

        Raises:
            FileExistsError: `filename` exists, and `overwrite` is False.
            FileNotFoundError: There is no such object.
        """
        if not overwrite and os.path.lexists(filename):
            raise FileExistsError(f"`filename` {str(filename)!r} already exists. Pass `overwrite=True` to replace it.")
        self._storage.download(object_name, filename, False if callback is None else callback)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names of the objects that begin with `prefix`, also in folders."""
        return self._storage.find(prefix or "")

    def close(self) -> None:
        """Do nothing: connections end with the object. For programs that call it."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class S3ObjectStore(ObjectStore):
    """A bucket of S3, or of a store with the same protocol. Needs `s3fs`.

    Args:
        bucket: The name of the bucket.
        prefix: A folder in it; names are relative to it.
        region_name: The region.
        endpoint_url: The address of the server; else that in `S3_ENDPOINT_URL`, else Amazon's.
        aws_access_key_id: The key; else the client looks for credentials in its usual places.
        aws_secret_access_key: The secret that belongs to it.
        aws_session_token: The token of a temporary key.
        client_config: Settings of `botocore.config.Config`.

    Raises:
        ModuleNotFoundError: `s3fs` is not installed.

    Differs: there is no `transfer_config`, because s3fs transfers the files, not boto3.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        client_config: dict[str, Any] | None = None,
    ) -> None:
        options = {
            "key": aws_access_key_id,
            "secret": aws_secret_access_key,
            "token": aws_session_token,
            "endpoint_url": endpoint_url,
            "client_kwargs": {"region_name": region_name} if region_name else None,
            "config_kwargs": client_config,
        }
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__(_uri("s3", bucket, prefix), **given)


class GCSObjectStore(ObjectStore):
    """A bucket of Google Cloud Storage. Needs `gcsfs`, which looks for credentials in the usual places.

    Args:
        bucket: The name of the bucket.
        prefix: A folder in it; names are relative to it.

    Raises:
        ModuleNotFoundError: `gcsfs` is not installed.

    Differs: keys in `GCS_KEY` and `GCS_SECRET` are not used.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(_uri("gs", bucket, prefix))


def _uri(scheme: str, bucket: str, prefix: str) -> str:
    return "/".join(part.strip("/") for part in (f"{scheme}://{bucket.strip('/')}", prefix) if part.strip("/"))


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the object store of a URI's bucket; the names of its objects are the paths of URIs.

    Args:
        uri: A URI; a local path has no object store.

    Raises:
        NotImplementedError: There is no object store for this scheme.
    """
    scheme, bucket, _ = parse_uri(uri)
    if scheme == "":
        return None
    if scheme not in _SCHEMES:
        raise NotImplementedError(
            f"There is no object store for {scheme}:// as in {uri!r}. Use one of {', '.join(sorted(_SCHEMES))}."
        )
    if scheme == "s3":
        return S3ObjectStore(bucket=bucket)
    if scheme in ("gs", "gcs"):
        return GCSObjectStore(bucket=bucket)
    return ObjectStore(f"{scheme}://{urlsplit(uri).netloc}/")
