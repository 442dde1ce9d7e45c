"""Common parts of both uploaders: the object store of a URI, and uploads of copies of files."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer.checkpoint.names import MLFLOW_EXPERIMENT_ID_FORMAT_KEY, MLFLOW_RUN_ID_FORMAT_KEY, has_mlflow_ids
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.storage import Storage, check_bucket, split_uri, without_password
from composer.checkpoint.upload import Uploader
from composer.utils import dist, partial_format
from composer.utils.object_store import utils as object_stores
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.remote_paths import AZURE_ARGUMENTS
from composer.utils.object_store.storages import storage_in

CREDENTIALS_FILE = ".credentials_validated_successfully"
"""The name of the file that is uploaded to check the credentials."""


@dataclass(frozen=True)
class Backend:
    """The object store of a URI.

    Attributes:
        name: The kind, as for `build_remote_backend`.
        bucket: The bucket, container or host.
        path: The path in it.
        arguments: The arguments of the class.
        uri: The URI of the bucket; for SFTP that of the folder.
    """

    name: str
    bucket: str
    path: str
    arguments: dict[str, Any]
    uri: str

    @classmethod
    def of_uri(cls, uri: str, arguments: Mapping[str, Any] | None) -> Backend:
        """Return the store of a URI.

        Args:
            uri: The URI of the bucket, or of a folder in it.
            arguments: Arguments of the class; they take precedence over those that the URI gives.

        Raises:
            ValueError: The URI names no bucket.
        """
        check_bucket(uri)
        scheme, bucket, path = split_uri(uri)
        of_bucket, of_uri = f"{scheme}://{bucket}", dict[str, Any]()
        if scheme in ("s3", "gs", "oci"):
            of_uri["bucket"] = bucket
        elif scheme == "libcloud":
            of_uri["container"] = bucket
        elif scheme == "azure":
            scheme, of_uri = "libcloud", {"container": bucket, **AZURE_ARGUMENTS}
        elif scheme == "sftp":
            of_bucket, of_uri["host"] = uri, bucket if uri == of_bucket and not set("@:") & set(bucket) else uri
        elif scheme == "dbfs":
            of_uri["path"] = path
        name = bucket.partition("@")[0] if scheme == "oci" else bucket
        return cls(scheme, name, path, {**of_uri, **(arguments or {})}, of_bucket)

    def name_of(self, uri: str) -> str | None:
        """Return the name that the object of a URI has in this store; None if the URI is in another one.

        A URI for SFTP must begin with that of the folder, except for the password. All URIs of Databricks count as in
        this store, whichever volume they name.
        """
        scheme, bucket, path = split_uri(uri)
        if scheme != "sftp":
            return path if f"{scheme}://{bucket}" == self.uri else None
        folder, inside = without_password(self.uri), without_password(uri)
        start = folder if folder.endswith("//") else f"{folder.rstrip('/')}/"
        name = inside.removeprefix(start)
        return name if inside.startswith(start) and not name.startswith("/") else None

    def build(self) -> ObjectStore:
        """Make the object store.

        Raises:
            ValueError: There is no such kind, or an argument cannot work.
        """
        return object_stores.build_remote_backend(self.name, self.arguments)

    def storage(self, attempts: int) -> Storage:
        """Return the storage in the object store, with a maximum number of attempts of a request."""
        inside = getattr(self.build(), "storage", None)
        storage = inside if isinstance(inside, Storage) else storage_in(self.build, self.uri)
        return storage.with_attempts(attempts)

    def with_mlflow_ids(self) -> Backend:
        """Return this store with identifiers of MLflow in place of placeholders; a collective if it has any."""
        path = str(self.arguments.get("path", ""))
        if self.name != "dbfs" or not has_mlflow_ids(path):
            return self

        def fill() -> str:
            store: Any = self.build()
            ids = {MLFLOW_EXPERIMENT_ID_FORMAT_KEY: store.experiment_id, MLFLOW_RUN_ID_FORMAT_KEY: store.run_id}
            return partial_format(path, **ids)

        filled = on_first_rank(fill, problem=f"Rank 0 found no run of MLflow for {path!r}")
        return replace(self, arguments={**self.arguments, "path": filled}, path=filled)

    def check_credentials(self, upload: Callable[[], None]) -> None:
        """Upload a tiny file on rank 0; a collective, if there is a process group, in which all learn of its failure.

        Args:
            upload: Uploads it; called on rank 0.

        Raises:
            Exception: On rank 0, what `upload` raises. On the others a ConnectionError or TimeoutError if that is one,
                else a RuntimeError.
        """
        if dist.is_initialized():
            on_first_rank(upload, problem=f"Rank 0 cannot upload to {without_password(self.uri)}")
        elif dist.get_global_rank() == 0:
            upload()


def upload_copy(uploader: Uploader, file: Path, folder: Path, name: str, overwrite: bool) -> Future[None]:
    """Copy a file, and queue the copy. Only the copy of a failed upload is kept.

    Args:
        uploader: The queue.
        file: The file, which may be changed or removed afterwards.
        folder: The folder for the copy; it is created if necessary.
        name: As for `Uploader.upload`.
        overwrite: As for `Uploader.upload`.

    Returns:
        The upload.

    Raises:
        Exception: As `Uploader.upload`.
        FileNotFoundError: There is no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{uuid.uuid4()}-{file.name}"
    try:
        shutil.copyfile(file, copy)
        upload = uploader.upload(copy, name, overwrite=overwrite)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    upload.add_done_callback(lambda done: copy.unlink(missing_ok=True) if done.exception() is None else None)
    return upload
