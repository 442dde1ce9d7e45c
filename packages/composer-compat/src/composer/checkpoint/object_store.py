"""Object stores under another import path; `composer.utils.object_store` defines them."""

from composer.utils.object_store.gcs_object_store import GCSObjectStore as GCSObjectStore
from composer.utils.object_store.object_store import ObjectStore as ObjectStore
from composer.utils.object_store.object_store import ObjectStoreTransientError as ObjectStoreTransientError
from composer.utils.object_store.remote_paths import (
    maybe_create_object_store_from_uri as maybe_create_object_store_from_uri,
)
from composer.utils.object_store.s3_object_store import S3ObjectStore as S3ObjectStore
from composer.utils.object_store.storage_object_store import FsspecObjectStore as FsspecObjectStore
from composer.utils.object_store.storage_object_store import StorageObjectStore as StorageObjectStore

__all__ = [
    "FsspecObjectStore",
    "GCSObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "StorageObjectStore",
    "maybe_create_object_store_from_uri",
]
