"""Uploads files to a folder of an object store, each with a future."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from composer.checkpoint.storage import without_password
from composer.checkpoint.upload import Uploader
from composer.utils import int_at_least, is_uri
from composer.utils.object_store.backend_uploads import CREDENTIALS_FILE, Backend, upload_copy
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.remote_paths import validate_credentials

log = logging.getLogger(__name__)

_KINDS = ("dbfs", "gs", "libcloud", "oci", "s3", "sftp")


class RemoteFilesExistingCheckStatus(Enum):
    """The outcome of `RemoteUploader.check_remote_files_exist_async`."""

    EXIST = 1
    """All files are there."""
    TIMEOUT = 2
    """Some were not there in time."""
    ERROR = 3
    """The last upload of one of them failed."""


class RemoteUploader:
    """Uploads files in the background, and returns a future for each.

    A process that ends without `wait_and_close` waits for the uploads, and logs those that failed.

    Args:
        remote_folder: The URI of the folder, such as `s3://bucket/folder`. Names of files are relative to the bucket.
        backend_kwargs: More arguments of the object store's class.
        num_concurrent_uploads: The number of simultaneous uploads.
        num_attempts: The maximum number of attempts after transient failures.

    Attributes:
        remote_backend_name: The kind of store, as for `build_remote_backend`.
        remote_bucket_name: The bucket, container or host.
        path: The folder in the bucket.
        backend_kwargs: The arguments of the object store's class.
        futures: The uploads that `check_workers` has not found done.

    Raises:
        ValueError: A number is below 1, or `remote_folder` is a local path or names no bucket.
        NotImplementedError: There is no object store for this scheme.
    """

    def __init__(
        self,
        remote_folder: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        num_concurrent_uploads: int = 2,
        num_attempts: int = 3,
    ) -> None:
        self.num_concurrent_uploads = int_at_least("num_concurrent_uploads", num_concurrent_uploads, 1)
        self.num_attempts = int_at_least("num_attempts", num_attempts, 1)
        if not is_uri(remote_folder):
            raise ValueError(f"`remote_folder` must be a URI, such as 's3://bucket/folder', got {remote_folder!r}.")
        self._backend = Backend.of_uri(remote_folder, backend_kwargs)
        if self._backend.name not in _KINDS:
            raise NotImplementedError(
                f"There is no uploader for {self._backend.name}:// as in {without_password(remote_folder)!r}. Use "
                f"one of azure, {', '.join(_KINDS)}."
            )
        self.remote_backend_name, self.remote_bucket_name = self._backend.name, self._backend.bucket
        self.futures: list[Future[None]] = []
        self.path, self.backend_kwargs = self._backend.path, self._backend.arguments
        self._uploader: Uploader | None = None
        self._staging: Path | None = None
        self._failed: set[str] = set()  # the names whose last upload failed
        self._closed = threading.Event()

    @cached_property
    def remote_backend(self) -> ObjectStore:
        """The object store, made when it is first needed."""
        return self._backend.build()

    def init(self) -> None:
        """Check the credentials: rank 0 uploads a tiny file.

        If there is a process group, this is a collective, and all ranks learn of its failure; otherwise the other ranks
        do not check.

        Raises:
            ConnectionError: Rank 0 cannot upload because of such an error; there, its own error is raised.
            TimeoutError: Likewise.
            RuntimeError: Rank 0 cannot upload because of any other error.
        """
        self._backend = self._backend.with_mlflow_ids()
        self.path, self.backend_kwargs = self._backend.path, self._backend.arguments
        self._backend.check_credentials(lambda: validate_credentials(self.remote_backend, CREDENTIALS_FILE))

    def upload_file_async(
        self, remote_file_name: str, file_path: str | os.PathLike[str], overwrite: bool
    ) -> Future[None]:
        """Copy a file, and upload the copy in the background.

        Args:
            remote_file_name: The name in the bucket.
            file_path: The file, which may be changed or removed afterwards.
            overwrite: Replace an object of this name.

        Returns:
            The upload. It ends with a FileExistsError if there is an object of this name and `overwrite` is False.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The name leaves the bucket, or the folder of SFTP.
        """
        if self._uploader is None:
            self._staging = Path(tempfile.mkdtemp(prefix="composer-uploads-"))
            self._uploader = Uploader(self._backend.storage(self.num_attempts), concurrent=self.num_concurrent_uploads)
        assert self._staging is not None, "made with the uploader"
        name = remote_file_name.lstrip("/")
        future = upload_copy(self._uploader, Path(file_path), self._staging, name, overwrite)
        self._failed.discard(name)
        future.add_done_callback(lambda done: None if done.exception() is None else self._failed.add(name))
        self.futures.append(future)
        return future

    def check_workers(self) -> None:
        """Raise the first failure, and forget uploads that are done. Does not wait.

        Raises:
            Exception: The failure of an upload.
        """
        done = [future for future in self.futures if future.done()]
        self.futures = [future for future in self.futures if future not in done]  # more may be done by now
        for future in done:
            future.result()

    def wait(self) -> None:
        """Wait for all uploads.

        Raises:
            TimeoutError: The store hangs; the message names the first file.
            Exception: The first failure of an upload.
        """
        if self._uploader is not None:
            with suppress(Exception):  # a failure, even that of a store that hangs, is the result of its future
                self._uploader.wait()
        self.check_workers()

    def wait_and_close(self) -> None:
        """Wait for all uploads, and end the threads. A later upload starts new ones.

        Raises:
            Exception: As `wait`.
        """
        try:
            self.wait()
        finally:
            self._closed.set()
            self._closed = threading.Event()
            uploader, self._uploader = self._uploader, None
            staging, self._staging = self._staging, None
            if uploader is not None:
                uploader.close()
            if staging is not None and not any(staging.iterdir()):  # the copies of failed uploads are kept
                staging.rmdir()

    def check_remote_files_exist_async(
        self,
        remote_checkpoint_file_names: Sequence[str],
        max_wait_time_in_seconds: float = 3600,
        wait_before_next_try_in_seconds: float = 30,
    ) -> Future[RemoteFilesExistingCheckStatus]:
        """Watch in the background until files exist, for example those that other ranks upload.

        Args:
            remote_checkpoint_file_names: The names in the bucket.
            max_wait_time_in_seconds: How long to watch; a request that the store does not answer takes longer.
            wait_before_next_try_in_seconds: The pause between two checks.

        Returns:
            The outcome: all exist, it took too long (or this object was closed), or this object could not upload one
            of them.
        """
        names = [name.lstrip("/") for name in remote_checkpoint_file_names]
        end, closed = time.monotonic() + max_wait_time_in_seconds, self._closed

        def watch() -> RemoteFilesExistingCheckStatus:
            storage, missing = self._backend.storage(self.num_attempts), names
            while not self._failed.intersection(names):
                missing = [name for name in missing if not storage.exists(name)]
                if not missing:
                    return RemoteFilesExistingCheckStatus.EXIST
                left = end - time.monotonic()
                if left <= 0 or closed.wait(min(left, wait_before_next_try_in_seconds)):
                    log.warning("These files did not appear in %s: %s", storage, ", ".join(missing))
                    return RemoteFilesExistingCheckStatus.TIMEOUT
            return RemoteFilesExistingCheckStatus.ERROR

        result: Future[RemoteFilesExistingCheckStatus] = Future()

        def run() -> None:
            try:
                result.set_result(watch())
            except Exception as error:  # noqa: BLE001 - raised by the future
                result.set_exception(error)

        threading.Thread(target=run, name="composer-remote-files", daemon=True).start()
        return result
