"""Make the object store of a URI, list its objects, and check the credentials for it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from composer.checkpoint.names import MLFLOW_DBFS_PATH_PREFIX
from composer.checkpoint.storage import authority_of, check_bucket, retrying, split_uri, without_password
from composer.utils import file_helpers, parse_uri
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.storage_object_store import FsspecObjectStore

AZURE_ARGUMENTS: Mapping[str, str] = {
    "provider": "AZURE_BLOBS",
    "key_environ": "AZURE_ACCOUNT_NAME",
    "secret_environ": "AZURE_ACCOUNT_ACCESS_KEY",
}
"""The arguments of `LibcloudObjectStore` for Azure, except for the container."""

_FSSPEC = frozenset("abfs abfss az file gcs memory oss s3a".split())


def _make(name: str, **arguments: Any) -> ObjectStore:
    made: ObjectStore = getattr(file_helpers, name)(**arguments)
    return made


def _dbfs(bucket: str, path: str) -> ObjectStore:
    name = "MLFlowObjectStore" if path.startswith(MLFLOW_DBFS_PATH_PREFIX) else "UCObjectStore"
    return _make(name, path=path)


def _sftp(bucket: str, path: str) -> ObjectStore:
    return _make("SFTPObjectStore", host=f"sftp://{bucket}//")  # paths of URIs begin at the root, not in the home


BACKEND_TO_OBJECT_STORE_FACTORY: dict[str, Callable[[str, str], ObjectStore]] = {
    "s3": lambda bucket, path: _make("S3ObjectStore", bucket=bucket),
    "gs": lambda bucket, path: _make("GCSObjectStore", bucket=bucket),
    "oci": lambda bucket, path: _make("OCIObjectStore", bucket=bucket),
    "azure": lambda bucket, path: _make("LibcloudObjectStore", container=bucket, **AZURE_ARGUMENTS),
    "dbfs": _dbfs,
    "sftp": _sftp,
    "ssh": _sftp,
}
"""Functions of bucket and path by scheme. The stores that they return have paths of URIs as names.

For `oci` the bucket includes the namespace (`bucket@namespace`), and for `sftp` and `ssh` it is the host with user and
port, if the URI has them.

Classes are looked up in `composer.utils.file_helpers` when a function is called. A function that a program adds for a
scheme of its own serves all URIs with that scheme: checkpoints are saved to and loaded from its stores. For the schemes
above, except `dbfs`, checkpoints go through fsspec.
"""


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the object store of a URI's bucket; the names of its objects are the paths of URIs.

    Args:
        uri: A URI; a local path has no object store.

    Raises:
        NotImplementedError: There is no object store for this scheme.
        ImportError: The client for it is not installed.
        ValueError: The URI names no bucket.
    """
    check_bucket(uri)
    scheme, bucket, path = split_uri(uri)
    if scheme == "":
        return None
    factory = BACKEND_TO_OBJECT_STORE_FACTORY.get(scheme)
    if factory is not None:
        return factory(bucket, path)
    if scheme not in _FSSPEC:
        known = sorted({*BACKEND_TO_OBJECT_STORE_FACTORY, *_FSSPEC})
        raise NotImplementedError(
            f"There is no object store for {scheme}:// as in {without_password(uri)!r}. Use one of {', '.join(known)}."
        )
    return FsspecObjectStore(f"{scheme}://{authority_of(uri)}/")


def list_remote_objects(remote_path: str) -> list[str]:
    """List the sorted names of the objects whose names begin with the path of a URI.

    Args:
        remote_path: The URI.

    Raises:
        ValueError: `remote_path` is a local path.
    """
    path = parse_uri(remote_path)[2]
    store = maybe_create_object_store_from_uri(remote_path)
    if store is None:
        raise ValueError(f"`remote_path` must be a URI, got the local path {remote_path!r}.")
    with store:
        return sorted(store.list_objects(path))


def validate_credentials(remote_backend: ObjectStore, remote_file_name_to_test: str) -> None:
    """Upload a tiny file, so that wrong credentials are found before hours of training.

    Args:
        remote_backend: The store.
        remote_file_name_to_test: The name of the file, which stays.

    Raises:
        Exception: What the store raises; after an `ObjectStoreTransientError` it is tried again, three times in all.
    """
    with tempfile.TemporaryDirectory(prefix="composer-credentials-") as folder:
        file = os.path.join(folder, "credentials")
        with open(file, "w", encoding="utf-8") as opened:
            opened.write("credentials_validated_successfully")
        retrying(
            lambda: remote_backend.upload_object(object_name=remote_file_name_to_test, filename=file),
            f"upload {remote_file_name_to_test!r} to {remote_backend!r}",
            remote_file_name_to_test,
            is_object_store=True,
        )


def validate_remote_path() -> None:
    """The command `composer_validate_remote_path`: list the objects at a URI; fail if there are none."""
    parser = argparse.ArgumentParser(
        prog="composer_validate_remote_path",
        description="List the objects at a URI, to see that it exists and that the credentials allow to read it.",
    )
    parser.add_argument("remote_path", help="a URI, such as s3://bucket/folder")
    remote_path = parser.parse_args().remote_path
    try:
        names = list_remote_objects(remote_path)
    except Exception as error:  # noqa: BLE001 - a user needs the message, not a traceback
        sys.exit(f"{without_password(remote_path)} cannot be read: {error}")
    if not names:
        sys.exit(f"There are no objects at {without_password(remote_path)}.")
    print("\n".join(names))
