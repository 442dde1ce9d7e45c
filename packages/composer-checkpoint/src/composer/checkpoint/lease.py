"""A lease on a save folder, so that two launches never write the same files.

A lock of the operating system keeps other processes of this host out. It ends with its process, so a launch takes over
from a dead one at once. A record, a small file in the folder, names the run, its host and process, and when the run has
last renewed the record, which it does as it trains. Launches on other hosts read the record, because the lock may not
reach them: shared file systems differ in that, and the lock of a remote store is in the temporary folder of one host.
Such a launch waits until the record is renewed (the folder is in use), or has not been for `STALE_SECONDS` (the folder
is taken over). A run that continues after its lease was taken over raises an error at its next batch or save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from composer.checkpoint.durable import replacing
from composer.checkpoint.storage import storage_of, without_password
from composer.core import ComposerError
from composer.utils import is_uri

log = logging.getLogger(__name__)

RENEW_SECONDS = 30.0
STALE_SECONDS = 120.0  # a file server keeps the locks of a dead host for up to 90 s (NFS 4)
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0  # how long to wait for a store that hangs
_NEWER = "a newer Trainer of this process"
_RELEASED = 0  # the time in the record of a released lease, where records cannot be removed


class FolderInUseError(ComposerError, RuntimeError):
    """Another run saves to the folder, or has taken it over from this one."""


class Lease:
    """The exclusive right of a run to save to a folder.

    Within one process, a new lease takes the folder over from an older one: a notebook may create a new Trainer without
    closing the old one.

    Args:
        where: The folder, a path or a URI; created if necessary when the lease is taken.
        run_name: The run.
        files: The pattern of the files that the run writes there. If it holds `{run_name}`, only runs of the same name
            exclude each other.
    """

    def __init__(self, where: str, run_name: str, files: str) -> None:
        self.where, self.run_name = without_password(where), run_name
        name = ".composer"
        if "{run_name}" in files:
            name += f"-{hashlib.sha256(run_name.encode()).hexdigest()[:12]}"
        self.name = f"{name}.owner"
        if is_uri(where):
            self._folder: Any = storage_of(where)
            key = hashlib.sha256(f"{self.where}/{self.name}".encode()).hexdigest()[:16]
            lock = Path(tempfile.gettempdir()) / f"composer-{key}.lock"
        else:
            self._folder = _LocalFolder(Path(os.path.realpath(where)))
            lock = self._folder.path / f"{name}.lock"
        # Any thread may release it. Where the file system has no locks, the record decides, not filelock's substitute.
        self._lock = FileLock(lock, thread_local=False, fallback_to_soft=False)
        self._record: dict[str, Any] | None = None  # None: not held
        self._lost: str | None = None  # who took it over
        self._renewed = self._written = 0.0  # when a renewal began, and when one last succeeded
        self._renewal: threading.Thread | None = None
        self._writing = threading.Lock()  # a late renewal must not write again what `release` has removed

    def acquire(self) -> None:
        """Take the lease, or take it over from an owner that is gone.

        This waits for up to `STALE_SECONDS` while nobody can tell whether an owner on another host is alive.

        Raises:
            FolderInUseError: Another run uses the folder.
            OSError: The record cannot be written.
        """
        if self._record is not None:
            self.check()
            return
        other = _HELD.get(self._lock.lock_file)
        if other is not None and other._record is not None:
            other.release()
            other._lost = _NEWER
        host, now = socket.gethostname(), time.time()
        own = {"run_name": self.run_name, "host": host, "pid": os.getpid(), "since": now, "token": secrets.token_hex(8)}
        try:
            found = self._wait_for_owner(host)
            own["renewed"] = time.time()
            # Some stores cannot create a file exclusively and return None. Of two simultaneous launches there, the one
            # that writes last gets the folder, and the other one raises an error at its first save.
            created = None if found is not None else self._folder.write_new_text(self.name, json.dumps(own))
            if created is False:
                raise FolderInUseError(self._refusal(self._read() or {}))
            if created is None:
                self._write(own)
        except BaseException:
            self._lock.release()
            raise
        self._record, self._lost = own, None
        self._renewed = self._written = time.monotonic()
        _HELD[self._lock.lock_file] = self

    def _wait_for_owner(self, host: str) -> dict[str, Any] | None:
        """Wait until the owner is known to be gone; return its record, if any.

        Raises:
            FolderInUseError: The owner is alive.
        """
        first: dict[str, Any] | None = None  # the record that this launch waits for
        began = time.monotonic()
        while True:
            locked, found = self._try_lock(), self._read()
            record = found or {}
            is_here = record.get("host") == host
            if found is None and locked is not False:
                return None
            if (is_here and locked is False) or (first is not None and record != first):
                raise FolderInUseError(self._refusal(record))
            if is_here and locked:
                log.info("Took over %s from a run that has ended: %s.", self.where, _describe(record))
                return found
            if max(_age(record), time.monotonic() - began) > STALE_SECONDS:
                if locked is False:
                    advice = f"Wait until it ends; if its host is gone, remove {self._lock.lock_file!r}"
                    raise FolderInUseError(self._refusal(record, advice))
                if record.get("renewed") != _RELEASED:
                    log.warning(
                        "Taking over %s from %s, which has not renewed its lease for %.0f seconds. If it still runs, "
                        "it stops at its next batch or save.", self.where, _describe(record), STALE_SECONDS,
                    )  # fmt: skip
                return found
            if first is None:
                first = record
                log.warning(
                    "%s was in use %.0f s ago by %s. This process cannot tell whether that run is alive: waiting up to "
                    "%.0f seconds for it to renew its lease, and taking the folder over if it does not. If you know "
                    "that it has ended, remove %r there.",
                    self.where, _age(record), _describe(record), STALE_SECONDS - max(_age(record), 0.0), self.name,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)

    def _try_lock(self) -> bool | None:
        """Return True if this process holds the lock, False if another does, None if the file system has no locks."""
        try:
            Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            if not self._lock.is_locked:
                self._lock.acquire(blocking=False)
        except Timeout:
            return False
        except (OSError, NotImplementedError):
            return None
        return True

    def _refusal(self, record: dict[str, Any], advice: str = "") -> str:
        advice = advice or f"Wait until it ends, stop it (`kill {record.get('pid')}` on {record.get('host')})"
        return (
            f"`save_folder` must not be in use by another run, got {self.where!r}: {_describe(record)} saves there, "
            f"last renewed {max(_age(record), 0.0):.0f} s ago. {advice}, or choose another `save_folder` or `run_name`."
        )

    def check(self, *, saving: bool = False) -> None:
        """Renew the lease if it is time, and raise if another run has taken it over. Call it at each batch.

        The lease is renewed in a thread, so a store that hangs does not stop the training.

        Args:
            saving: Renew it now and wait some seconds for the result, because a checkpoint is written next.

        Raises:
            FolderInUseError: Another run has taken it over.
        """
        if self._record is not None and (saving or time.monotonic() - self._renewed > RENEW_SECONDS):
            self._renewed = time.monotonic()
            if self._renewal is None or not self._renewal.is_alive():
                self._renewal = _in_thread(self._renew, _PATIENCE_SECONDS if saving else 0.0)
        if self._lost is not None:
            why = (
                f" Another launch does that when a run has neither ended a batch nor saved for {STALE_SECONDS:.0f} "
                f"seconds, for example because it is suspended or evaluates."
            )
            raise FolderInUseError(
                f"The run {self.run_name!r} no longer saves to {self.where!r}: {self._lost} has taken over the folder."
                f"{'' if self._lost == _NEWER else why} Start this run again with another `save_folder`."
            )

    def _renew(self) -> None:
        with self._writing:
            own = self._record
            if own is None:
                return
            try:
                record = self._read()
                is_late = time.monotonic() - self._written > STALE_SECONDS
                if record is None and is_late:  # the run that took it over has ended
                    self._record, self._lost = None, "a run that has ended meanwhile"
                elif record is None or record.get("token") == own["token"]:
                    self._write({**own, "renewed": time.time()})
                    self._written = time.monotonic()
                else:
                    self._record, self._lost = None, _describe(record)
            except Exception as error:  # noqa: BLE001 - if the folder cannot be read or written, the save says so
                log.debug("The lease on %s was not renewed: %s", self.where, error)

    def release(self) -> None:
        """Release the lease, waiting some seconds for a store; it may be taken again later. Safe to call twice."""
        own, self._record, self._lost = self._record, None, None

        def remove() -> None:
            with self._writing, suppress(Exception):  # if it fails, the next launch takes the lease over
                if own is not None and (self._read() or {}).get("token") == own["token"]:
                    try:
                        self._folder.delete(self.name)
                    except PermissionError:  # object stores of composer-compat have no operation for it
                        self._write({**own, "renewed": _RELEASED})

        if own is not None:
            _in_thread(remove, _PATIENCE_SECONDS)
        if self._lock.is_locked:
            with suppress(OSError):  # Windows removes no open files
                os.unlink(self._lock.lock_file)
        self._lock.release()

    def _read(self) -> dict[str, Any] | None:
        """Return the record; None if there is none, empty if it is damaged or being written."""
        try:
            record = json.loads(self._folder.read_text(self.name))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, record: dict[str, Any]) -> None:
        self._folder.write_text(self.name, json.dumps(record))


_HELD: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
"""The leases that this process has taken, by their lock files."""


class _LocalFolder:
    """The methods of `Storage` that a lease calls, for a local folder, without the 0.2 s to import fsspec."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def write_new_text(self, name: str, text: str) -> bool:
        try:
            with open(self.path / name, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def write_text(self, name: str, text: str) -> None:
        with replacing(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def _in_thread(call: Callable[[], object], seconds: float) -> threading.Thread:
    """Call a function that may hang in a thread, and wait for at most some seconds until it has returned."""
    thread = threading.Thread(target=call, name="composer-lease", daemon=True)
    with suppress(RuntimeError):  # the interpreter is about to end
        thread.start()
        thread.join(seconds)
    return thread


def _age(record: dict[str, Any]) -> float:
    """Return the seconds since a record was renewed; 0 if it does not say."""
    now = time.time()
    return now - float(record.get("renewed", now))


def _describe(record: dict[str, Any]) -> str:
    if not record:
        return "a run whose record cannot be read"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(record.get("since", 0))))
    name, host, pid = (record.get(key) for key in ("run_name", "host", "pid"))
    return f"the run {name!r} on host {host!r} (process {pid}, since {since})"
