"""Object stores with the protocol of Amazon S3."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from composer.checkpoint.storage import StorageError, direct_storage
from composer.utils.object_store.storage_object_store import StorageObjectStore, as_folder, bucket_name


class S3ObjectStore(StorageObjectStore):
    """A bucket of S3, or of a store with the same protocol. Needs the extra `s3` of composer-checkpoint.

    An object that the credentials do not allow to read is a FileNotFoundError, like a missing one.

    Args:
        bucket: The name of the bucket.
        prefix: A folder in it; names are relative to it.
        region_name: The region.
        endpoint_url: The address of the server; else that in `S3_ENDPOINT_URL`, else Amazon's.
        aws_access_key_id: The key; else the client looks for credentials in its usual places.
        aws_secret_access_key: The secret that belongs to it.
        aws_session_token: The token of a temporary key.
        client_config: Settings of `botocore.config.Config`. Unless it says otherwise, retries are adaptive, and each
            attempt waits 5 seconds for a connection and 15 for a reply (`connect_timeout`, `read_timeout`).
        transfer_config: `multipart_chunksize`, the size in bytes of the parts of large files, and `max_concurrency`,
            how many of them are sent at a time.

    Attributes:
        bucket: The name of the bucket.
        prefix: The folder, which ends in a slash, or is empty.
        transfer_config: The argument.

    Raises:
        ModuleNotFoundError: `s3fs` is not installed.
        ValueError: `bucket` is not a bucket name, or `transfer_config` has other settings.

    Differs: `s3fs` transfers the files, not boto3, so other settings of boto3's `TransferConfig` have no counterpart. A
        size is read without the object.
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
        client_config: Mapping[str, Any] | None = None,
        transfer_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.bucket, self.prefix = bucket_name(bucket), as_folder(prefix)
        self.transfer_config = dict(transfer_config or {})
        unknown = sorted(set(self.transfer_config) - {"multipart_chunksize", "max_concurrency"})
        if unknown:
            raise ValueError(
                f"`transfer_config` must have only `multipart_chunksize` and `max_concurrency`, got "
                f"{', '.join(unknown)}."
            )
        # botocore adds entries to what it gets.
        config = copy.deepcopy({"retries": {"mode": "adaptive"}, **(client_config or {})})
        self._client_options = {
            "region_name": region_name,
            "endpoint_url": endpoint_url or os.environ.get("S3_ENDPOINT_URL"),
            "aws_access_key_id": aws_access_key_id,
            "aws_secret_access_key": aws_secret_access_key,
            "aws_session_token": aws_session_token,
        }
        self._config = copy.deepcopy(config)
        options: dict[str, Any] = {
            "key": aws_access_key_id,
            "secret": aws_secret_access_key,
            "token": aws_session_token,
            "endpoint_url": endpoint_url,
            "client_kwargs": {"region_name": region_name} if region_name else None,
            "max_concurrency": self.transfer_config.get("max_concurrency"),
            "block_size": self.transfer_config.get("multipart_chunksize"),
        }
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__(direct_storage(f"s3://{self.bucket}/{self.prefix}", config_kwargs=config, **given))

    @cached_property
    def client(self) -> Any:
        """A client of botocore with the same settings, for requests that this class does not make."""
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client("s3", config=Config(**copy.deepcopy(self._config)), **self._client_options)

    def get_key(self, object_name: str) -> str:
        """Return the name of an object in the bucket."""
        return f"{self.prefix}{object_name}"

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file; see `ObjectStore.upload_object`.

        The only option is `ExtraArgs`, a dictionary with arguments of S3's requests, such as `{"ACL": "private"}`.

        Raises:
            OSError: It cannot be uploaded.
            ValueError: Another option is given.
        """
        extra = dict(kwargs.pop("ExtraArgs", None) or {})
        if kwargs:
            raise ValueError(f"`upload_object` must have no option but `ExtraArgs`, got {', '.join(sorted(kwargs))}.")
        with self._explaining():
            self.storage.upload(filename, object_name, False if callback is None else callback, **extra)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise FileNotFoundError where S3 refuses, as it does for missing objects without the right to list them."""
        try:
            yield
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                raise FileNotFoundError(str(error)) from error
            raise
