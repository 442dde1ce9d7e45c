"""Object stores: buckets of files. `ObjectStore` is the interface; the others need the client of their vendor."""

from composer.utils.object_store.gcs_object_store import GCSObjectStore as GCSObjectStore
from composer.utils.object_store.libcloud_object_store import LibcloudObjectStore as LibcloudObjectStore
from composer.utils.object_store.mlflow_object_store import (
    MLFLOW_EXPERIMENT_ID_FORMAT_KEY as MLFLOW_EXPERIMENT_ID_FORMAT_KEY,
)
from composer.utils.object_store.mlflow_object_store import MLFLOW_RUN_ID_FORMAT_KEY as MLFLOW_RUN_ID_FORMAT_KEY
from composer.utils.object_store.mlflow_object_store import MLFlowObjectStore as MLFlowObjectStore
from composer.utils.object_store.object_store import ObjectStore as ObjectStore
from composer.utils.object_store.object_store import ObjectStoreTransientError as ObjectStoreTransientError
from composer.utils.object_store.oci_object_store import OCIObjectStore as OCIObjectStore
from composer.utils.object_store.s3_object_store import S3ObjectStore as S3ObjectStore
from composer.utils.object_store.sftp_object_store import SFTPObjectStore as SFTPObjectStore
from composer.utils.object_store.storage_object_store import FsspecObjectStore as FsspecObjectStore
from composer.utils.object_store.uc_object_store import UCObjectStore as UCObjectStore
from composer.utils.object_store.utils import build_remote_backend as build_remote_backend

__all__ = [
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "FsspecObjectStore",
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
