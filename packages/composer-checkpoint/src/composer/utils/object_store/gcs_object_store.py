"""Object stores of Google Cloud Storage."""

from __future__ import annotations

import os

from composer.checkpoint.storage import Connection, Storage, check_installed, direct_storage, leave_retries_to_botocore
from composer.utils.object_store.storage_object_store import StorageObjectStore, as_folder, bucket_name

__all__ = ["GCSObjectStore"]

_ENDPOINT = "https://storage.googleapis.com"


class GCSObjectStore(StorageObjectStore):
    """A bucket of Google Cloud Storage. Needs the extra `gcs` of composer-checkpoint.

    With `GCS_KEY` and `GCS_SECRET` in the environment, its S3 protocol is used, which needs the extra `s3` instead;
    otherwise Google's default credentials.

    Args:
        bucket: The name of the bucket.
        prefix: A folder in it; names are relative to it.

    Attributes:
        bucket_name: The name of the bucket.
        prefix: The folder, which ends in a slash, or is empty.

    Raises:
        ModuleNotFoundError: `gcsfs` or `s3fs` is not installed.
        ValueError: `bucket` is not a bucket name, or there are no credentials.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket_name, self.prefix = bucket_name(bucket), as_folder(prefix)
        uri = f"gs://{self.bucket_name}/{self.prefix}"
        key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
        if key and secret:
            super().__init__(self._through_s3(uri, key, secret))
        elif os.environ.get("STORAGE_EMULATOR_HOST"):
            super().__init__(direct_storage(uri, token="anon"))
        else:
            super().__init__(direct_storage(uri, token="google_default"))
            _check_credentials()

    def _through_s3(self, uri: str, key: str, secret: str) -> Storage:
        check_installed("s3", uri)
        root = f"{self.bucket_name}/{self.prefix}".rstrip("/")

        def connect() -> tuple[object, str]:
            from s3fs import S3FileSystem

            filesystem = S3FileSystem(
                key=key,
                secret=secret,
                endpoint_url=os.environ.get("S3_ENDPOINT_URL") or _ENDPOINT,
                client_kwargs={"region_name": "auto"},
                # Google's servers do not know the checksums that newer clients add.
                config_kwargs={
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
                skip_instance_cache=True,
            )
            leave_retries_to_botocore(filesystem)
            return filesystem, root

        return Storage(uri, {}, connection=Connection(connect))


def _check_credentials() -> None:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        google.auth.default()
    except DefaultCredentialsError as error:
        raise ValueError(
            "No Google Cloud credentials were found. Set `GCS_KEY` and `GCS_SECRET`, or "
            "`GOOGLE_APPLICATION_CREDENTIALS` to a file of credentials, or run `gcloud auth application-default login`."
        ) from error
