"""Object stores of Google Cloud Storage."""

from __future__ import annotations

import os

from composer.checkpoint.storage import direct_storage
from composer.utils.object_store.storage_object_store import StorageObjectStore, as_folder, bucket_name


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
        super().__init__(direct_storage(f"gs://{self.bucket_name}/{self.prefix}"))
        has_key = os.environ.get("GCS_KEY") and os.environ.get("GCS_SECRET")
        if has_key or os.environ.get("STORAGE_EMULATOR_HOST"):
            return
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError

        try:
            google.auth.default()
        except DefaultCredentialsError as error:
            raise ValueError(
                "No Google Cloud credentials were found. Set `GCS_KEY` and `GCS_SECRET`, or "
                "`GOOGLE_APPLICATION_CREDENTIALS` to a file of credentials, or run `gcloud auth application-default "
                "login`."
            ) from error
