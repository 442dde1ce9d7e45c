"""Uploads of a run's checkpoints, repeated while their store is down."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from composer.checkpoint.shards import files_of_run
from composer.checkpoint.storage import ObjectStoreTransientError, Storage
from composer.checkpoint.upload import Uploader
from composer.utils.delivery import DeliveryDeadline

log = logging.getLogger(__name__)


@dataclass
class _Upload:
    path: str
    name: str
    overwrite: bool
    link: tuple[str, str] | None
    future: Future[None]

    @property
    def error(self) -> BaseException | None:
        """The error of an upload that failed."""
        return self.future.exception() if self.future.done() else None

    @property
    def is_delivered(self) -> bool:
        return self.future.done() and self.future.exception() is None


class CheckpointUploads:
    """Uploads checkpoints in background threads, and retries those that failed temporarily.

    An upload that failed in a way that may be temporary (a lost connection, a busy store) is queued again with the next
    checkpoint, and once more by `wait` and `close`. Its local files must exist until it is complete; see `paths`. Any
    other failure, such as a missing permission, is raised by `check`.

    Args:
        storage: The bucket to upload to.
        concurrent: Uploads at a time.
        deadline: How long `wait` and `close` wait for a store that fails or hangs.
        limit: The limit of a wait in seconds even for a store that works; None: no limit.
    """

    def __init__(self, storage: Storage, *, concurrent: int, deadline: DeliveryDeadline, limit: float | None) -> None:
        self._deadline = deadline
        self._uploader = Uploader(storage, concurrent=concurrent, timeout=deadline, limit=limit)
        self._lock = threading.Lock()  # checkpoints may be written, and queued, in the background
        self._unfinished: list[_Upload] = []
        self._newest: _Upload | None = None
        self._raised = False
        self._process = os.getpid()

    @property
    def paths(self) -> set[str]:
        """The local paths of the checkpoints that are not uploaded yet."""
        return {upload.path for upload in self._remaining()}

    @property
    def failing(self) -> bool:
        """True if the last upload failed, or an earlier wait for the store timed out."""
        return self._uploader.failing

    def upload(self, path: str, name: str, *, overwrite: bool, link: tuple[str, str] | None) -> None:
        """Queue a checkpoint, after those that the store could not take.

        Args:
            path: The file, or the folder of shards.
            name: Its name in the bucket.
            overwrite: Replace an existing one of this name; otherwise a FileExistsError is raised later.
            link: The name and the text of a small file that is written after the upload.
        """
        with self._lock:
            self._raised = False
            self._unfinished = [upload for upload in self._unfinished if upload.name != name or not upload.error]
            self._repeat()
            self._newest = _Upload(path, name, overwrite, link, Future())
            self._queue(self._newest)

    def check(self) -> None:
        """Raise the first failure that another attempt does not fix, if any."""
        for error in self._errors():
            if not isinstance(error, ObjectStoreTransientError):
                self._raised = True
                raise error

    def wait(self) -> None:
        """Wait until all uploads have ended, including repeated ones.

        Raises:
            TimeoutError: They have not ended in time.
            Exception: The first failure of an upload that is not complete.
        """
        with self._lock:
            if self._deadline.failing:
                self._deadline.delivered()  # the failure may be old: the last attempts get the full time
            self._repeat()
        try:
            self._uploader.wait()
        except Exception as error:
            errors = self._errors()
            if not errors:
                return  # what had failed is complete now
            self._raised = True
            if isinstance(error, TimeoutError) or error is errors[0]:
                raise
            raise errors[0] from None

    def close(self) -> None:
        """Wait until all uploads have ended, and end the threads. Raises like `wait`, but no failure twice."""
        if os.getpid() != self._process:
            return
        try:
            if not self._raised:
                self.wait()
        finally:
            self._uploader.close()

    def _remaining(self) -> list[_Upload]:
        with self._lock:
            self._unfinished = [upload for upload in self._unfinished if not upload.is_delivered]
            return list(self._unfinished)

    def _errors(self) -> list[BaseException]:
        return [error for upload in self._remaining() if (error := upload.error) is not None]

    def _repeat(self) -> None:
        failed = [upload for upload in self._unfinished if isinstance(upload.error, ObjectStoreTransientError)]
        if failed:
            names = ", ".join(upload.name for upload in failed)
            log.warning("Retrying the uploads to %r that failed: %s", self._uploader.storage, names)
        for upload in failed:
            self._unfinished.remove(upload)
            upload.overwrite = True  # what a failed attempt has left there is this run's own
            self._queue(upload)

    def _queue(self, upload: _Upload) -> None:
        *others, last = files_of_run(Path(upload.path), upload.name)
        upload.future = self._uploader.upload(
            *last,
            overwrite=upload.overwrite,
            # A newer checkpoint may have been uploaded meanwhile, and its link must stay.
            link=upload.link if upload is self._newest else None,
            before=others,
        )
        self._unfinished.append(upload)
