"""Uploads to an object store that is made from the name of its kind and its arguments, in threads or processes."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from composer.checkpoint.names import MLFLOW_EXPERIMENT_ID_FORMAT_KEY, MLFLOW_RUN_ID_FORMAT_KEY, has_mlflow_ids
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.storage import (
    Progress,
    Storage,
    authority_of,
    check_bucket,
    split_uri,
    without_password,
)
from composer.checkpoint.upload import Send, Uploader
from composer.utils import dist, partial_format
from composer.utils.delivery import call_at_exit
from composer.utils.object_store import utils as object_stores
from composer.utils.object_store.object_store import ObjectStore
from composer.utils.object_store.remote_paths import AZURE_ARGUMENTS
from composer.utils.object_store.storages import storage_in

log = logging.getLogger(__name__)

CREDENTIALS_FILE = ".credentials_validated_successfully"
"""The name of the file that is uploaded to check the credentials."""
_STAGGER = "COMPOSER_LOCAL_RANK_STAGGER_SECONDS"
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Backend:
    """An object store that any thread or process can make.

    Attributes:
        name: The kind, as for `build_remote_backend`.
        bucket: The bucket, container or host.
        path: The path in it.
        arguments: The arguments of the class.
        uri: The URI of the bucket, with the namespace, or the user and port, that the given one has.
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
        of_uri: dict[str, Any] = {}
        if scheme in ("s3", "gs", "oci"):
            of_uri["bucket"] = bucket
        elif scheme == "libcloud":
            of_uri["container"] = bucket
        elif scheme == "azure":
            scheme, of_uri = "libcloud", {"container": bucket, **AZURE_ARGUMENTS}
        elif scheme == "sftp":
            is_host = not _folder_in(uri) and "@" not in bucket and ":" not in bucket
            of_uri["host"] = bucket if is_host else uri
        elif scheme == "dbfs":
            of_uri["path"] = path
        name = bucket.partition("@")[0] if scheme == "oci" else bucket
        return cls(scheme, name, path, {**of_uri, **(arguments or {})}, f"{scheme}://{bucket}")

    def name_of(self, uri: str) -> str | None:
        """Return the name that the object of a URI has in this store; None if the URI is in another one.

        For SFTP, only a path after two slashes is absolute, as for `SFTPObjectStore`, and the URI must be in the folder
        of the store; its password is ignored. All URIs of Databricks count as in this store, whichever volume they
        name.
        """
        scheme, bucket, path = split_uri(uri)
        if scheme == "azure":
            if str(self.arguments.get("provider")).upper() != AZURE_ARGUMENTS["provider"]:
                return None
            scheme = "libcloud"
        if scheme != "sftp":
            return path if f"{scheme}://{bucket}" == self.uri else None
        if not self.uri.startswith("sftp://") or self._login(uri) != self._login(self.uri):
            return None
        inside = _folder_in(uri)
        given = _folder_in(str(self.arguments["host"]))
        # The store decodes the folder of its own URI, and the URIs that it returns have the decoded one.
        for folder in (given, unquote(given)) if given else (str(self.arguments.get("cwd", "")),):
            folder = folder.rstrip("/") or folder[:1]
            if not folder:  # the home of the user
                return None if inside.startswith("/") else inside
            start = f"{folder.rstrip('/')}/"
            if inside == folder or inside.startswith(start):
                return inside[len(start) :]
        return None

    def _login(self, uri: str) -> tuple[str, str, str]:
        """Return user, host and port of a URI for SFTP; what it lacks is as in the arguments."""
        user, _, address = authority_of(uri).rpartition("@")
        host, _, port = address.partition(":")
        name = unquote(user.partition(":")[0]) or str(self.arguments.get("username") or "")
        return name, host.lower(), port or str(self.arguments.get("port", 22))

    @property
    def shown(self) -> str:
        """The URI of the bucket, or of the folder for SFTP, for messages."""
        host = str(self.arguments.get("host", ""))
        return without_password(host if "://" in host else self.uri)

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


def _folder_in(uri: str) -> str:
    """Return what a URI has after the slash that ends its host; an absolute path begins with another slash."""
    return uri.partition("://")[2].partition("/")[2]


class UploadProcesses:
    """Processes that upload files, so that a slow client does not compete with the training for the interpreter.

    If one dies, all are restarted, and what they were uploading is uploaded again.

    Args:
        context: The context of `multiprocessing`.
        backend: The store; each process makes its own.
        number: The number of processes.
        attempts: The maximum number of attempts of a request, and of processes for one file.
    """

    def __init__(self, context: Any, backend: Backend, number: int, attempts: int) -> None:
        self._context, self._backend, self._number, self._attempts = context, backend, number, attempts
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        # The number of reports of progress, of all processes. No lock: a process may be killed while it holds one.
        self._sent: Any = context.Value("Q", 0, lock=False)
        self._closed = False
        self._process = os.getpid()
        call_at_exit(self.close)  # runs when uploads have ended or are given up; then the pool would wait forever

    def send(self, path: Path, name: str, progress: Progress) -> None:
        """Upload a file, and wait for it.

        Raises:
            Exception: What the store raises.
            RuntimeError: Processes died in all attempts, or this object is closed.
        """
        for attempt in range(1, self._attempts + 1):
            pool = self._open()
            try:
                return self._send(pool, path, name, progress)
            except BrokenProcessPool:
                self._discard(pool)
                if self._closed or attempt == self._attempts:
                    raise
                log.warning("A process that uploads has died; %s is uploaded again.", name)

    def _send(self, pool: ProcessPoolExecutor, path: Path, name: str, progress: Progress) -> None:
        size = os.stat(path).st_size
        future = pool.submit(_upload, str(path), name)
        seen = self._sent.value
        while not wait([future], _POLL_SECONDS).done:
            if self._sent.value != seen and callable(progress):
                seen = self._sent.value
                progress(1, size)
        future.result()

    def _open(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._closed:
                raise RuntimeError("The processes that upload have been ended.")
            if self._pool is None:
                arguments = (self._sent, self._backend, self._attempts)
                self._pool = ProcessPoolExecutor(
                    self._number, mp_context=self._context, initializer=_start, initargs=arguments
                )
            return self._pool

    def _discard(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.shutdown(wait=False)

    def close(self) -> None:
        """End the processes. What they are still uploading is lost."""
        if os.getpid() != self._process:
            return  # forked
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is None:
            return
        # `kill_workers` is new in Python 3.14. Without it, the end of the program would wait for a store that hangs.
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


_process: list[Any] = []  # what a process of the pool works with; not used anywhere else


def _start(sent: Any, backend: Backend, attempts: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to end
    _process[:] = [sent, backend, attempts]


def _upload(path: str, name: str) -> None:
    sent, backend, attempts = _process
    if isinstance(backend, Backend):  # made here, because a failure to start would not say why
        backend = backend.storage(attempts)
        _process[1] = backend

    def report(done: int, size: int) -> None:
        sent.value += 1  # reports of two processes may become one, which is enough

    backend.upload(path, name, report)


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

    def remove_uploaded(done: Future[None]) -> None:
        if done.exception() is None:
            copy.unlink(missing_ok=True)

    upload.add_done_callback(remove_uploaded)
    return upload


def stagger(send: Send) -> Send:
    """Return a function that uploads like `send`, later on higher local ranks.

    It waits `COMPOSER_LOCAL_RANK_STAGGER_SECONDS` times the local rank, so that processes do not upload all at once.

    Raises:
        ValueError: The variable is not a number of seconds.
    """
    text = os.environ.get(_STAGGER) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"`{_STAGGER}` must be a number of seconds, got {text!r}.")
    pause = seconds * dist.get_local_rank()
    if not pause:
        return send

    def later(path: Path, name: str, progress: Progress) -> None:
        time.sleep(pause)
        send(path, name, progress)

    return later
