"""Uploading files to a store: one now, or many in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from composer.checkpoint.durable import link_or_copy, temporary_path
from composer.checkpoint.storage import ObjectStoreTransientError, Storage, storage_of, without_password
from composer.utils.delivery import DeliveryDeadline, call_at_exit

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 10.0  # between two attempts to upload to a store that is down


def upload_file(
    source_path: str | os.PathLike[str],
    dest_dir: str,
    *,
    overwrite: bool = False,
    symlink_name: str | None = None,
) -> str:
    """Upload a file to a folder of a remote store, or of this machine. Returns when it is there completely.

    Transient failures are retried.

    Args:
        source_path: The file.
        dest_dir: The folder: a URI, such as `s3://bucket/run`, or a local path.
        overwrite: Replace a file of this name.
        symlink_name: The name of a text file beside it that links to the newest upload; it is written last, and
            readers such as `load_path` follow it. It must end in `.symlink`.

    Returns:
        The URI of the uploaded file.

    Raises:
        FileNotFoundError: There is no file `source_path`.
        FileExistsError: The store has a file of this name, and `overwrite` is False.
        StorageError: The store cannot be written, after several attempts.
        ValueError: `symlink_name` has another ending.
    """
    source = Path(source_path).expanduser()
    if symlink_name is not None and not symlink_name.endswith(".symlink"):
        raise ValueError(f"`symlink_name` must end in '.symlink', got {symlink_name!r}.")
    if not source.is_file():
        raise FileNotFoundError(f"There is no file {str(source)!r} to upload.")
    storage = storage_of(dest_dir)
    if not overwrite and storage.exists(source.name):
        uri = without_password(storage.uri(source.name))
        raise FileExistsError(f"{uri} already exists. Pass `overwrite=True` to replace it.")
    storage.upload(source, source.name)
    if symlink_name is not None:
        storage.write_text(symlink_name, source.name)
    return storage.uri(source.name)


@dataclass(eq=False)
class _Upload:
    number: int  # counts the uploads in the order of submission
    files: list[tuple[Path, Path, str]]  # in order: each file, its second name here, and its name in the store
    overwrite: bool
    link: tuple[str, str] | None
    future: Future[None] = field(default_factory=Future)

    @property
    def source(self) -> Path:
        """The last file, which completes the upload."""
        return self.files[-1][0]

    @property
    def name(self) -> str:
        """The name of the last file in the store."""
        return self.files[-1][2]

    def finish(self, failure: Exception | None) -> None:
        """End the future, unless the upload has been given up meanwhile."""
        with suppress(InvalidStateError):
            if failure is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(failure)

    def restore(self) -> None:
        """Make the files again that were removed meanwhile, as rotation does: they exist nowhere else."""
        for source, held, _ in self.files:
            with suppress(OSError):
                source.parent.mkdir(exist_ok=True)
                link_or_copy(held, source)


class Uploader:
    """Uploads files in background threads, and then the links that name them.

    - A queued file is held by a hard link next to it (a copy where there are no hard links), so it may be deleted or
      replaced by a rename as soon as `upload` returns. It must not be modified in place.
    - Uploads of one name happen in the order of submission, one after the other; others at the same time.
    - A link is written when its file is complete. An older link never replaces a newer one of the same name.
    - A failed upload does not stop the others. `check`, `wait` and `close` raise the first failure.

    The threads are daemons: others would be joined when the process ends, forever if a store hangs. Instead, a process
    that ends without `close` waits for pending uploads, for at most `timeout`, and logs each file that was not
    uploaded. A forked process has no threads and does not wait. When a process ends, Python 3.12.0 to 3.12.2 start no
    threads, which clients such as s3fs need (https://github.com/python/cpython/issues/113964): use a later one.

    Args:
        storage: Where to upload to.
        concurrent: Uploads at a time.
        timeout: How long `wait`, `close` and the end of the process wait in all for a store that fails or hangs, in
            seconds, or a deadline that is shared with other services; see `composer.utils.delivery.DeliveryDeadline`.
            A part that the store's client reports as sent is progress; a client that reports none is waited for until
            it fails. Then queued uploads are cancelled, and the last line of the log names the local files.
        rides_out: True if an upload that failed in a way that may be temporary (a lost connection, a busy store) is
            tried again until it succeeds or is given up. False: it has failed.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        concurrent: int = 1,
        timeout: float | DeliveryDeadline = 60.0,
        rides_out: bool = False,
    ) -> None:
        if concurrent < 1:
            raise ValueError(f"`concurrent` must be at least 1, got {concurrent!r}.")
        self.storage = storage
        self._concurrent, self._rides_out = concurrent, rides_out
        self._deadline = timeout if isinstance(timeout, DeliveryDeadline) else DeliveryDeadline(timeout)
        self._given_up = False
        self._changed = threading.Condition()  # its lock is reentrant
        self._waiting: list[_Upload] = []
        self._active: dict[str, _Upload] = {}
        self._submitted = 0
        self._link_lock = threading.Lock()
        self._newest: dict[str, int] = {}  # the number of the newest upload whose link was written, by its name
        self._failure: Exception | None = None  # the first one
        self._reported = False
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    @property
    def pending(self) -> tuple[str, ...]:
        """The names whose uploads have not ended, in the order of submission."""
        with self._changed:
            return tuple(upload.name for upload in self._uploads())

    @property
    def failing(self) -> bool:
        """True if the last upload failed, or an earlier wait for the store timed out."""
        return self._deadline.failing

    def _uploads(self) -> list[_Upload]:
        """Return the uploads that have not ended, in the order of submission."""
        return sorted([*self._waiting, *self._active.values()], key=lambda upload: upload.number)

    def upload(
        self,
        source: Path,
        name: str,
        *,
        overwrite: bool,
        link: tuple[str, str] | None = None,
        before: Sequence[tuple[Path, str]] = (),
    ) -> Future[None]:
        """Queue a file.

        Args:
            source: The file, which may be deleted or replaced as soon as this returns.
            name: Its name in the store.
            overwrite: Replace an existing file of this name; otherwise a FileExistsError is raised later by
                `check`, `wait` or `close`.
            link: The name and the text of a small file that is written after the upload.
            before: Files and their names to upload first; the file and its link follow when all of them are complete.

        Returns:
            The upload, which cannot be cancelled. It ends with its error if it fails, and with a TimeoutError if it is
            given up.

        Raises:
            FileNotFoundError: There is no such file.
            RuntimeError: The uploader is closed.
        """
        if self._closed:
            raise RuntimeError("The uploader is closed. Make a new one to upload more.")
        self.storage.uri(name)  # refuses names that leave the folder
        # A folder of several files may be removed, so they are held next to it.
        source = Path(source)
        folder = source.parent.parent if before else source.parent
        files = []
        for file, file_name in (*before, (source, name)):
            held = temporary_path(folder / file.name)
            link_or_copy(file, held)
            files.append((file, held, file_name))
        with self._changed:
            if not self.pending:
                self._deadline.progressed()  # the last progress may be long ago
            self._submitted += 1
            upload = _Upload(self._submitted, files, overwrite, link)
            upload.future.set_running_or_notify_cancel()  # it cannot be cancelled, as the file is uploaded in any case
            self._waiting.append(upload)
            if not self._threads:
                call_at_exit(self._finish_at_exit)
            number = len(self._threads)
            if number < min(self._concurrent, len(self._waiting) + len(self._active)):
                thread = threading.Thread(target=self._work, name=f"composer-upload-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        return upload.future

    def check(self) -> None:
        """Raise the first failure so far, if any. Costs next to nothing."""
        if self._failure is not None:
            self._reported = True
            raise self._failure

    def wait(self) -> None:
        """Wait until all uploads have ended.

        Raises:
            TimeoutError: They have not ended in time.
            Exception: The first failure.
        """
        self._join()
        self.check()

    def close(self) -> None:
        """Wait until all uploads have ended, and end the threads. Raises like `wait`, but no failure twice."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            self._join()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        for thread in self._threads if not self._given_up else ():
            thread.join(self._deadline.timeout)
        if not self._reported:
            self.check()

    def _join(self) -> None:
        """Wait until all uploads have ended, or give them up when the deadline is over."""
        since = time.monotonic()
        with self._changed:
            if self._rides_out and self.failing and not self._given_up:
                self._deadline.delivered()  # the failure may be old: the last attempts get the full time
            self._changed.notify_all()  # try now what waits for its next attempt
            while not self._given_up and self.pending:
                left = self._deadline.left(since)
                if self._active and not (self.storage.reports_progress or self.failing):
                    left = threading.TIMEOUT_MAX
                if left <= 0:
                    break
                self._changed.wait(left)
            uploads = self._uploads()
            if self._given_up or not (uploads or self.failing):
                return
            self._deadline.record_timeout(since)
            if not uploads:
                return
            self._given_up = True
            for upload in uploads:
                upload.restore()
                upload.finish(TimeoutError(f"{upload.source} was not uploaded to {self._shown(upload)}."))
            self._waiting.clear()
        text = (
            f"Uploads to {self.storage!r} have not ended in {self._deadline.timeout:g} seconds without progress: "
            f"{', '.join(upload.name for upload in uploads)}. The local files are kept: "
            f"{', '.join(str(upload.source) for upload in uploads)}. Check the network and that the store runs, or "
            f"pass a larger `delivery_timeout`."
        )
        log.error("%s", text)
        self._reported = True
        raise TimeoutError(text) from self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                upload = self._next()
                if upload is None or self._closed:
                    return
                self._waiting.remove(upload)
                self._active[upload.name] = upload
            failure = None
            try:
                self._perform(upload)
                self._deadline.delivered()
            except Exception as error:  # noqa: BLE001 - raised by `check`, `wait` or `close`
                log.warning("The upload of %s to %r failed: %s", upload.source, self.storage, error)
                self._deadline.failed()
                failure = error
            with self._changed:
                del self._active[upload.name]
                may_pass = self._rides_out and isinstance(failure, ObjectStoreTransientError)
                if may_pass and not upload.future.done():
                    upload.overwrite = True  # what the failed attempt has left there is our own
                    self._waiting.insert(0, upload)
                    self._changed.notify_all()
                    # A new upload, or somebody who waits for all of them, ends the pause.
                    self._changed.wait(_PAUSE_SECONDS)
                    continue
                if failure is not None:
                    upload.restore()
                for _, held, _ in upload.files:
                    held.unlink(missing_ok=True)
                self._failure = self._failure or failure
                upload.finish(failure)
                self._changed.notify_all()

    def _next(self) -> _Upload | None:
        """Return the first upload whose name no thread is uploading to."""
        return next((upload for upload in self._waiting if upload.name not in self._active), None)

    def _perform(self, upload: _Upload) -> None:
        if not upload.overwrite and self.storage.exists(upload.name):
            raise FileExistsError(
                f"{self._shown(upload)} already exists, but overwrite was set to False. Pass `overwrite=True` "
                f"(`save_overwrite=True` for the checkpoints of a Trainer) to replace it, or use another name."
            )
        for _, held, name in upload.files:
            self.storage.upload(held, name, self._progressed)  # returns when the file is complete
        if upload.link is not None:
            name, text = upload.link
            with self._link_lock:
                if upload.number >= self._newest.get(name, 0):
                    self._newest[name] = upload.number  # before writing, because a failed write may have arrived
                    self.storage.write_text(name, text)

    def _progressed(self, done: int, size: int) -> None:
        if done > 0:
            self._deadline.progressed()
            with self._changed:
                self._changed.notify_all()

    def _finish_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # forked; nothing may be locked here, because the lock may have been held
        if not self._closed and (pending := self.pending):
            log.warning("Waiting for uploads to %r before the process ends: %s", self.storage, ", ".join(pending))
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - the process ends
            log.error("Uploads to %r failed: %s", self.storage, error)
        for upload in self._uploads():
            log.error("%s was not uploaded to %s.", upload.source, self._shown(upload))

    def _shown(self, upload: _Upload) -> str:
        return without_password(self.storage.uri(upload.name))
