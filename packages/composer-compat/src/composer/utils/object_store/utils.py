"""Make an object store by the name of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.utils.object_store.gcs_object_store import GCSObjectStore as GCSObjectStore
from composer.utils.object_store.libcloud_object_store import LibcloudObjectStore as LibcloudObjectStore
from composer.utils.object_store.mlflow_object_store import MLFLOW_DBFS_PATH_PREFIX
from composer.utils.object_store.mlflow_object_store import MLFlowObjectStore as MLFlowObjectStore
from composer.utils.object_store.object_store import ObjectStore as ObjectStore
from composer.utils.object_store.object_store import ObjectStoreTransientError as ObjectStoreTransientError
from composer.utils.object_store.oci_object_store import OCIObjectStore as OCIObjectStore
from composer.utils.object_store.s3_object_store import S3ObjectStore as S3ObjectStore
from composer.utils.object_store.sftp_object_store import SFTPObjectStore as SFTPObjectStore
from composer.utils.object_store.uc_object_store import UCObjectStore as UCObjectStore

__all__ = [
    "GCSObjectStore",
    "LibcloudObjectStore",
    "MLFlowObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "SFTPObjectStore",
    "UCObjectStore",
    "build_remote_backend",
]

_CLASSES = {
    "s3": "S3ObjectStore",
    "gs": "GCSObjectStore",
    "oci": "OCIObjectStore",
    "sftp": "SFTPObjectStore",
    "libcloud": "LibcloudObjectStore",
}


def build_remote_backend(remote_backend_name: str, backend_kwargs: Mapping[str, Any]) -> ObjectStore:
    """Make an object store.

    The classes are those of this module when it is called: a program may replace them.

    Args:
        remote_backend_name: `s3`, `gs`, `oci`, `sftp`, `libcloud`, or `dbfs` for MLflow and Unity Catalog.
        backend_kwargs: The arguments of the class.

    Raises:
        ValueError: There is no such kind.
    """
    if remote_backend_name == "dbfs":
        is_mlflow = str(backend_kwargs.get("path", "")).lstrip("/").startswith(MLFLOW_DBFS_PATH_PREFIX)
        name = "MLFlowObjectStore" if is_mlflow else "UCObjectStore"
    elif remote_backend_name in _CLASSES:
        name = _CLASSES[remote_backend_name]
    else:
        known = ", ".join(sorted([*_CLASSES, "dbfs"]))
        raise ValueError(f"`remote_backend_name` must be one of {known}, got {remote_backend_name!r}.")
    made: ObjectStore = globals()[name](**backend_kwargs)
    return made
