"""Object stores of Oracle Cloud Infrastructure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from composer.checkpoint.storage import Connection, Storage, check_installed
from composer.utils.object_store.storage_object_store import StorageObjectStore, as_folder, bucket_name

_DEFAULT_CONFIG = "~/.oci/config"


class OCIObjectStore(StorageObjectStore):
    """A bucket of Oracle Cloud Infrastructure. Needs the extra `oci` of composer-checkpoint.

    The credentials are those of the profile `DEFAULT` in the file that `OCI_CONFIG_FILE` names, else in
    `~/.oci/config`.

    Args:
        bucket: The name of the bucket, or `bucket@namespace` for one of another tenancy.
        prefix: A folder in it; names are relative to it.

    Attributes:
        bucket: The name of the bucket.
        prefix: The folder, which ends in a slash, or is empty.

    Raises:
        ModuleNotFoundError: `ocifs` is not installed.
        ValueError: `bucket` is not a bucket name, or the configuration cannot be read or is not valid. All methods
            raise it if there is no such bucket, or a request is not valid.

    Differs: a size is read without the object, and the prefix applies to all methods.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        name = bucket_name(bucket).removesuffix("@")
        self.bucket, _, self._namespace = name.partition("@")
        if not self.bucket:
            raise ValueError(f"`bucket` must name the bucket, as in 'bucket@namespace', got {bucket!r}.")
        self.prefix = as_folder(prefix)
        uri = f"oci://{name}/{self.prefix}"
        check_installed("oci", uri)
        import oci

        path = os.path.expanduser(os.environ.get("OCI_CONFIG_FILE") or _DEFAULT_CONFIG)
        try:
            self._config: dict[str, Any] = oci.config.from_file(path)
            oci.config.validate_config(self._config)
        except (oci.exceptions.ClientError, ValueError) as error:
            raise ValueError(
                f"The configuration of OCI, {path!r}, cannot be used: {error}. Set `OCI_CONFIG_FILE` to another one."
            ) from error
        super().__init__(Storage(uri, {}, connection=Connection(self._connect)))

    @cached_property
    def client(self) -> Any:
        """A client of the SDK with the same settings, for requests that this class does not make."""
        from oci.object_storage import ObjectStorageClient

        return ObjectStorageClient(self._config)

    @cached_property
    def namespace(self) -> str:
        """The namespace of the bucket; that of the tenancy is requested when it is first read."""
        return self._namespace or str(self.client.get_namespace().data)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names of the objects that begin with `prefix`, including those in subfolders."""
        with self._explaining():
            names = super().list_objects(prefix)
            if not names:
                self.client.list_objects(self.namespace, self.bucket, limit=1)  # fails if there is no bucket
            return names

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise ValueError for a missing bucket, a request that the client refuses, and a failed upload in parts."""
        import oci

        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                missing = isinstance(cause, oci.exceptions.ServiceError) and cause.code == "BucketNotFound"
                if missing or isinstance(cause, (oci.exceptions.ClientError, oci.exceptions.MultipartUploadError)):
                    raise ValueError(f"The request to OCI failed: {cause}") from error
                cause = cause.__cause__
            raise

    def _connect(self) -> tuple[Any, str]:
        from ocifs import OCIFileSystem

        filesystem = OCIFileSystem(config=dict(self._config), iam_type="api_key", skip_instance_cache=True)
        return filesystem, f"{self.bucket}@{self.namespace}/{self.prefix}".rstrip("/")
