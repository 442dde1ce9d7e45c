"""Uploading files to a store: one now, or many in the background."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from composer.checkpoint.durable import link_or_copy, temporary_path
from composer.checkpoint.storage import Progress, Storage, storage_of, without_password
from composer.utils.delivery import DeliveryDeadline, call_at_exit

log = logging.getLogger(__name__)

_SILENT_SECONDS = 3600.0  # that a store which reports no progress may take for a file

Send = Callable[[Path, str, Progress], None]
"""A function that uploads a file under a name, and reports its progress."""


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


def _running_future() -> Future[None]:
    """Return a future that cannot be cancelled, because the file is uploaded in any case."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True)
class _Upload:
    number: int  # in the order of submission
    source: Path
    held: Path  # a second name of the file
    name: str
    overwrite: bool
    link: tuple[str, str] | None
    before: list[tuple[Path, str]]  # second names of files that are uploaded first, and their names
    future: Future[None] = field(default_factory=_running_future)


class Uploader:
    """Uploads files in background threads, and then the links that name them.

    - A queued file is held by a hard link next to it (a copy where there are no hard links), so it may be deleted or
      replaced by a rename as soon as `upload` returns. It must not be modified in place.
    - Uploads of one name happen in the order of submission, one after the other; others at the same time.
    - A link is written when its file is complete. An older link never replaces a newer one of the same name.
    - A failed upload does not stop the others. `check`, `wait` and `close` raise the first failure.

    The threads are daemons: others would be joined when the process ends, forever if a store hangs. Instead, a process
    that ends without `close` waits for pending uploads, for at most `timeout`, and logs each file that was not
    uploaded. A forked process has no threads and does not wait.

    Args:
        storage: Where to upload to.
        concurrent: Uploads at a time.
        timeout: How long `wait`, `close` and the end of the process wait in all for a store that fails or hangs, in
            seconds, or a deadline that is shared with other services; see `composer.utils.delivery.DeliveryDeadline`.
            A part that the store's client reports as sent is progress. Then queued uploads are
            cancelled, and the last line of the log names the local files.
        limit: The limit of `wait` in seconds even for a store that works; None: no limit.
        send: Uploads a file; None: `storage.upload`.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        concurrent: int = 1,
        timeout: float | DeliveryDeadline = 60.0,
        limit: float | None = None,
        send: Send | None = None,
    ) -> None:
        if concurrent < 1:
            raise ValueError(f"`concurrent` must be at least 1, got {concurrent!r}.")
        self.storage, self._send = storage, send or storage.upload
        self._concurrent, self._limit = concurrent, math.inf if limit is None else limit
        self._is_shared_deadline = isinstance(timeout, DeliveryDeadline)  # that of a Trainer
        self._deadline = timeout if isinstance(timeout, DeliveryDeadline) else DeliveryDeadline(timeout)
        self._given_up = False
        self._changed = threading.Condition()  # of a lock that may be taken again
        self._waiting: list[_Upload] = []
        self._active: dict[str, _Upload] = {}
        self._begun = 0.0  # when the last upload began
        self._submitted = 0
        self._links: dict[str, tuple[threading.Lock, list[int]]] = {}  # the number of the newest, once it was begun
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
            RuntimeError: The uploader is closed, or belongs to the process this one was forked from.
        """
        self._check_usable()
        self.storage.uri(name)  # refuses names that leave the folder
        source = Path(source)
        # A folder of several files may be removed, so they are held next to it.
        folder = source.parent.parent if before else source.parent
        held = _hold(source, folder)
        first = [(_hold(file, folder), name) for file, name in before]
        with self._changed:
            if not self.pending:
                self._deadline.progressed()  # the last progress may be long ago
            self._submitted += 1
            upload = _Upload(self._submitted, source, held, name, overwrite, link, first)
            self._waiting.append(upload)
            self._start_threads()
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

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("The uploader is closed. Make a new one to upload more.")
        if os.getpid() != self._process:
            raise RuntimeError("The uploader belongs to the process that this one was forked from. Make a new one.")

    def _join(self) -> None:
        if os.getpid() != self._process:
            self._check_usable()
        if self._given_up:
            return
        since = time.monotonic()
        with self._changed:
            while self.pending:
                left = min(self._seconds_left(since), since + self._limit - time.monotonic())
                if left <= 0:
                    break
                pending = len(self.pending)
                self._changed.wait_for(lambda: len(self.pending) < pending, left)  # noqa: B023 - called immediately
            names = self.pending
            if names or self._deadline.failing:
                self._deadline.record_timeout(since)
            if not names:
                return
            kept = self._give_up()
        text = (
            f"Uploads to {self.storage!r} have not ended in {self._deadline.timeout:g} seconds without progress: "
            f"{', '.join(names)}. The local files are kept: {', '.join(kept)}. Check the network and that the store "
            f"runs{', or pass a larger `delivery_timeout`' if self._is_shared_deadline else ''}."
        )
        log.error("%s", text)
        self._reported = True
        raise TimeoutError(text) from self._failure

    def _seconds_left(self, since: float) -> float:
        left = self._deadline.left(since)
        if left <= 0 and self._active and not self.storage.reports_progress and not self._deadline.failing:
            return self._begun + _SILENT_SECONDS - time.monotonic()  # the store may be working
        return left

    def _give_up(self) -> list[str]:
        """Cancel all queued uploads, but keep the files."""
        self._given_up = True
        kept: list[str] = []
        for upload in self._uploads():
            for held, source in ((upload.held, upload.source), *((held, held) for held, _ in upload.before)):
                if not source.exists():  # rotated out meanwhile
                    with suppress(OSError):
                        link_or_copy(held, source)
                kept.append(str(source))
            _finish(upload.future, TimeoutError(f"{upload.source} was not uploaded to {self._shown(upload)}."))
        self._waiting.clear()
        return kept

    def _start_threads(self) -> None:
        if not self._threads:
            call_at_exit(self._finish_at_exit)
        busy = len(self._waiting) + len(self._active)
        if len(self._threads) < min(self._concurrent, busy):
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"composer-upload-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                upload = self._next()
                if upload is None or self._closed:
                    return
                self._waiting.remove(upload)
                self._active[upload.name] = upload
                self._begun = time.monotonic()
            try:
                self._perform(upload)
            except Exception as error:  # noqa: BLE001 - raised by `check`, `wait` or `close`
                log.warning("The upload of %s to %r failed: %s", upload.source, self.storage, error)
                with self._changed:
                    if self._failure is None:
                        self._failure = error
                self._deadline.failed()
                _finish(upload.future, error)
            else:
                self._deadline.delivered()
                _finish(upload.future, None)
            finally:
                for held in (upload.held, *(file for file, _ in upload.before)):
                    held.unlink(missing_ok=True)
                with self._changed:
                    del self._active[upload.name]
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
        for file, name in upload.before:
            self._send(file, name, self._progressed)
        self._send(upload.held, upload.name, self._progressed)  # returns when the file is complete
        if upload.link is not None:
            self._write_link(upload.number, *upload.link)

    def _progressed(self, done: int, size: int) -> None:
        if done > 0:
            self._deadline.progressed()
            with self._changed:
                self._changed.notify_all()

    def _write_link(self, number: int, name: str, text: str) -> None:
        with self._changed:
            lock, newest = self._links.setdefault(name, (threading.Lock(), [0]))
        with lock:
            if number < newest[0]:
                return
            newest[0] = number  # before writing, because a failed write may have arrived
            self.storage.write_text(name, text)

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


def _finish(future: Future[None], failure: Exception | None) -> None:
    with suppress(InvalidStateError):  # it has been given up meanwhile
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)


def _hold(source: Path, folder: Path) -> Path:
    """Make a hard link to a file in a folder; a copy if the file system has no hard links."""
    held = temporary_path(folder / source.name)
    link_or_copy(source, held)
    return held
