"""Stores the files of a run in an object store, and fetches them from there."""

from __future__ import annotations

import os
import queue
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from composer.checkpoint.download import get_file
from composer.checkpoint.storage import check_bucket, split_uri, without_password
from composer.checkpoint.upload import Uploader
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.loggers.spi import check_delivery_options
from composer.utils import check_integers, ensure_tuple, format_name_with_dist, is_uri
from composer.utils.delivery import DeliveryDeadline
from composer.utils.object_store.backend_uploads import CREDENTIALS_FILE, Backend, upload_copy
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.remote_paths import validate_credentials

_SILENCE_SECONDS = 60.0


class RemoteUploaderDownloader(LoggerDestination):
    """Uploads the files that callbacks, loggers and `Logger.upload_file` hand over, in the background.

    A file is copied first, so it may be changed or removed immediately. Uploads of one name happen one after the other,
    so the last one wins. `fit`, evaluations and predictions end by waiting for all uploads. A failed upload
    is reported there, or at the end of the next batch or epoch: as a warning, or, with `on_error="raise"`, as an error
    that ends the run. What was not uploaded is named when the run is closed, and its copies are kept.

    It also works outside the Trainer: call `init(state, logger)`, then `upload_file`, and `post_close` at the end. Its
    methods for events, such as `batch_end`, then raise the first failure.

    Args:
        bucket_uri: The bucket, such as `s3://bucket`, `gs://`, `oci://`, `azure://container`, `libcloud://container`,
            `sftp://user@host//folder` or `dbfs:/Volumes/...`.
        backend_kwargs: More arguments of the object store's class.
        file_path_format_string: The name of an object, with `{remote_file_name}` and the variables of
            `FORMAT_NAME_WITH_DIST_TABLE`.
        num_concurrent_uploads: The number of simultaneous uploads.
        upload_staging_folder: The folder for copies; else a temporary one.
        use_procs: Has no effect: uploads run in threads.
        num_attempts: The maximum number of attempts after transient failures.
        on_error: What a Trainer does if an upload fails: "warn" (once; the run continues) or "raise".

    Attributes:
        remote_backend_name: The kind of store, as for `build_remote_backend`.
        remote_bucket_name: The bucket, container or host.
        backend_kwargs: The arguments of the object store's class.

    Raises:
        ValueError: A number is below 1, `on_error` is unknown, or the URI names no bucket.
    """

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        num_concurrent_uploads: int = 1,
        upload_staging_folder: str | None = None,
        use_procs: bool = True,
        num_attempts: int = 3,
        *,
        on_error: str = "warn",
    ) -> None:
        check_delivery_options(on_error)
        self.on_error = on_error
        check_integers(num_concurrent_uploads=num_concurrent_uploads, num_attempts=num_attempts, least=1)
        self._backend = Backend.of_uri(bucket_uri, backend_kwargs)
        self.remote_backend_name, self.remote_bucket_name = self._backend.name, self._backend.bucket
        self.file_path_format_string = file_path_format_string
        self.num_attempts, self.use_procs = num_attempts, use_procs
        self.upload_staging_folder = upload_staging_folder
        self._num_concurrent_uploads = num_concurrent_uploads  # programs of the reference set this name
        self._staging: Path | None = None
        self._run_name: str | None = None
        self._uploader: Uploader | None = None
        self._exception_queue: queue.Queue[BaseException] = queue.Queue()
        self._lost: list[str] = []  # the names of failed uploads

    @property
    def backend_kwargs(self) -> dict[str, Any]:
        """The arguments of the object store's class."""
        return self._backend.arguments

    @property
    def num_concurrent_uploads(self) -> int:
        """The number of simultaneous uploads."""
        return self._num_concurrent_uploads

    def serves(self, uri: str) -> bool:
        """Return True if `upload_file` accepts a URI as a name: it is in this bucket, or in this folder of SFTP."""
        return self._backend.name_of(uri) is not None

    @cached_property
    def remote_backend(self) -> ObjectStore:
        """The object store, made when it is first needed.

        Raises:
            ValueError: There is no such kind of store.
        """
        return self._backend.build()

    def init(self, state: State, logger: Logger) -> None:
        """Check the credentials, and get ready to upload.

        Rank 0 uploads a tiny file. If there is a process group, this is a collective, and all ranks learn of its
        failure; otherwise the other ranks do not check.

        Raises:
            ConnectionError: Rank 0 cannot upload because of such an error; there, its own error is raised.
            TimeoutError: Likewise.
            RuntimeError: `init` is called a second time, or rank 0 cannot upload because of any other error.
        """
        if self._uploader is not None:
            raise RuntimeError("The `RemoteUploaderDownloader` is already initialized. Make one for each run.")
        self._run_name = state.run_name
        self._backend = self._backend.with_mlflow_ids()
        self._backend.check_credentials(
            lambda: validate_credentials(self.remote_backend, self._remote_name(CREDENTIALS_FILE))
        )
        deadline = getattr(logger, "delivery_deadline", None)
        self._uploader = Uploader(
            self._backend.storage(self.num_attempts),
            concurrent=self._num_concurrent_uploads,
            timeout=deadline.for_service() if isinstance(deadline, DeliveryDeadline) else _SILENCE_SECONDS,
        )

    def can_upload_files(self) -> bool:
        """Return True."""
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Queue a file.

        Args:
            state: The run.
            remote_file_name: The name to store it under. A URI that this object does not serve is ignored.
            file_path: The file.
            overwrite: Replace an object of this name; otherwise a FileExistsError is raised later.

        Raises:
            FileExistsError: An object of this name is in the queue, and `overwrite` is False.
            FileNotFoundError: There is no such file.
            ValueError: The name leaves the bucket, or the folder of SFTP.
        """
        uploader = self._uploader
        if uploader is None:
            raise RuntimeError("The `RemoteUploaderDownloader` is not initialized, or closed. Call `init` first.")
        inside = self._name_in_store(remote_file_name)
        if inside is None:
            return
        name = self._remote_name(inside)
        if not overwrite and name in uploader.pending:
            raise FileExistsError(f"Object {name} was already enqueued to be uploaded, but overwrite=False.")
        if self._staging is None:
            given = self.upload_staging_folder
            self._staging = Path(tempfile.mkdtemp(prefix="composer-uploads-") if given is None else given)
        future = upload_copy(uploader, Path(file_path), self._staging, name, overwrite)

        def note(done: Any) -> None:
            error = done.exception()
            if error is not None:
                self._lost.append(name)
                self._exception_queue.put(error)

        future.add_done_callback(note)

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return the URI of a file under the name that `upload_file` takes.

        Raises:
            ValueError: The name is a URI that this object does not serve.
        """
        return self.remote_backend.get_uri(self._served_name(remote_file_name))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Fetch a file.

        Args:
            remote_file_name: The name that `upload_file` took.
            destination: The path to write to.
            overwrite: Replace an existing file.
            progress_bar: Show the progress.

        Raises:
            FileExistsError: `destination` exists, and `overwrite` is False.
            FileNotFoundError: There is no such file.
            ValueError: The name is a URI that this object does not serve.
        """
        get_file(self._served_name(remote_file_name), destination, self.remote_backend, overwrite, progress_bar)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._exception_queue.empty():
            raise self._exception_queue.queue[0]

    epoch_end = batch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._uploader is not None:
            self._uploader.wait()

    eval_standalone_end = fit_end
    predict_end = fit_end

    def post_close(self) -> None:
        """Wait for the uploads, end threads and processes, and warn of what was not uploaded."""
        uploader, self._uploader = self._uploader, None
        if uploader is None:
            return
        reason = ""
        try:
            uploader.close()
        except Exception as error:  # noqa: BLE001 - the warning names it, and the files
            reason = f" ({error})"
        lost = list(dict.fromkeys([*self._lost, *uploader.pending]))
        if lost:
            warnings.warn(
                f"The following objects may not have been uploaded, likely due to a worker crash: {', '.join(lost)}. "
                f"Their copies are kept in {self._staging}.{reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self._staging is not None and self.upload_staging_folder is None:
            self._staging.rmdir()

    def _name_in_store(self, remote_file_name: str) -> str | None:
        """Return the name in the store for a name or a URI; None for a URI that this object does not serve."""
        return self._backend.name_of(remote_file_name) if is_uri(remote_file_name) else remote_file_name

    def _served_name(self, remote_file_name: str) -> str:
        inside = self._name_in_store(remote_file_name)
        if inside is None:
            raise ValueError(
                f"`remote_file_name` must be a name or a URI in {without_password(self._backend.uri)}, got "
                f"{without_password(remote_file_name)!r}."
            )
        return self._remote_name(inside)

    def _remote_name(self, remote_file_name: str) -> str:
        if self._run_name is None:
            raise RuntimeError("The `RemoteUploaderDownloader` does not know the run yet. Call `init` first.")
        name = format_name_with_dist(
            self.file_path_format_string, self._run_name, remote_file_name=remote_file_name.lstrip("/")
        )
        return os.path.normpath(name.lstrip("/")).replace(os.sep, "/")


def maybe_create_remote_uploader_downloader_from_uri(
    uri: str, loggers: LoggerDestination | Sequence[LoggerDestination]
) -> RemoteUploaderDownloader | None:
    """Return a `RemoteUploaderDownloader` for a URI's bucket.

    Args:
        uri: A URI; a local path needs no uploader.
        loggers: The loggers that exist already.

    Returns:
        None for a local path and, with a warning, if one of `loggers` serves the bucket.

    Raises:
        NotImplementedError: There is no object store for this scheme.
        ValueError: The URI names no bucket.
    """
    check_bucket(uri)
    shown = without_password(uri)
    scheme, bucket, path = split_uri(uri)
    if scheme == "":
        return None
    for logger in ensure_tuple(loggers):
        is_there = isinstance(logger, RemoteUploaderDownloader) and logger.serves(uri)
        if is_there and (scheme != "dbfs" or logger.backend_kwargs.get("path") == path):
            warnings.warn(
                f"There already exists a RemoteUploaderDownloader object to handle the uri {shown!r}, so no other one "
                f"is made.",
                stacklevel=2,
            )
            return None
    of_bucket = {
        **{name: f"{name}://{bucket}" for name in ("azure", "gs", "oci", "s3")},
        "libcloud": f"azure://{bucket}",
        "dbfs": uri,
        "sftp": f"sftp://{bucket}//" if uri.partition("://")[2].startswith(f"{bucket}//") else f"sftp://{bucket}",
    }
    if scheme not in of_bucket:
        raise NotImplementedError(
            f"There is no uploader for {scheme}:// as in {shown!r}. Use one of azure, dbfs, gs, oci, s3, sftp."
        )
    return RemoteUploaderDownloader(of_bucket[scheme])
