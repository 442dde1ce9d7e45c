"""A lease on a save folder, so that two launches never write the same files.

The lease is a small file in the folder that says which process saves there: its host, process id, when that process
started, and the run's name. It is created by `os.link`, which either creates the file or fails, on NFS too. Every
few seconds a thread of its owner renews the modification time.

A launch that finds a lease checks whether its owner is gone:

- A process of the same host that has ended, was started later than the lease says (a recycled process id), or ran
  before the machine was rebooted: the lease is taken over immediately.
- A process of the same host that runs: the folder is in use.
- A process of another host, of another container, or one that is stopped (SIGSTOP): only the heartbeat is known. If the
  last one is older than `STALE_SECONDS`, the lease is taken over; otherwise the launch waits until it is, or until the
  next heartbeat shows that the folder is in use. Ages are computed from times of the file server only, not from clocks
  of several machines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from composer.checkpoint.durable import link_or_copy, temporary_path
from composer.checkpoint.storage import Storage, without_password
from composer.core import ComposerError

__all__ = ["FolderInUseError", "Lease", "folder_lease", "live_patterns", "remote_lease"]

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
REMOTE_HEARTBEAT_SECONDS, REMOTE_STALE_SECONDS = 20.0, 120.0
_SETTLE_SECONDS = 1.0  # without conditional writes: the time until a competitor's write is visible
_PATIENCE_SECONDS = 5.0  # the time to wait for a store that hangs
_NAME = ".composer{}.lease"


class FolderInUseError(ComposerError, RuntimeError):
    """Another run saves to the folder, or has taken it over from this one."""


class Record(NamedTuple):
    """The content of a lease that was read."""

    token: str
    owner: dict[str, Any]
    heartbeat: Any  # changes with each heartbeat


class Lease:
    """The exclusive right of a run to save to a folder. Create it with `folder_lease` or `remote_lease`.

    Args:
        place: The file of the lease.
        where: The folder, for messages.
        run_name: The run.
        files: The pattern of the files that the run writes there.

    Attributes:
        active: True if its run is training. Within one process, only an active lease excludes another run: a notebook
            may create a new Trainer without closing the old one.
    """

    def __init__(self, place: _LocalLeaseFile | _RemoteLeaseFile, where: str, run_name: str, files: str) -> None:
        self.place, self.where, self.run_name, self.files = place, without_password(where), run_name, files
        self.active = False
        self._owner: dict[str, Any] | None = None
        self._lost: str | None = None  # who took it over
        self._finalizer: Any = None
        self._reported = False
        self._waiting: tuple[Record, float] | None = None  # the lease that was read first, and when (monotonic)
        self._patience = [_PATIENCE_SECONDS]  # for the release
        self._checking: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """True if this object holds the lease, as far as it knows."""
        return self._owner is not None and self._lost is None

    def try_acquire(self) -> bool:
        """Take the lease, or take it over from an owner that is gone.

        Returns:
            True if it is held now. False: the owner may be gone; try again in a second.

        Raises:
            FolderInUseError: Another run uses the folder.
        """
        if self.held:
            self.check()
            return True
        owner = {"token": secrets.token_hex(8), **_this_process(), "run_name": self.run_name, "files": self.files}
        record = self.place.read()
        taken = self.place.create(owner) if record is None else self._try_take_over(record, owner)
        if taken:
            self._begin(owner)
        return taken

    def _try_take_over(self, record: Record, owner: dict[str, Any]) -> bool:
        if _is_same_process(record.owner):
            other = _HELD.get(record.token)
            if other is not None and other.active:
                advice = "It is another Trainer of this process, which is training. Wait until it ends"
                raise FolderInUseError(self._refusal(record, advice))
            taken = self.place.take_over(record, owner)
            if taken and other is not None:
                other._mark_lost("another Trainer of this process")
            return taken
        state = _state_of(record.owner)
        if state == "running":
            raise FolderInUseError(self._refusal(record))
        if state == "unknown" and not self._is_stale(record):
            return False
        taken = self.place.take_over(record, owner)
        if taken:
            log.info("Took over %s from a run that is gone: %s.", self.where, _describe(record.owner))
        return taken

    def _is_stale(self, record: Record) -> bool:
        """Return True if there was no heartbeat for a long time; raise if there is a new one."""
        age = self.place.age(record)
        if age is not None and age > self.place.stale_seconds:
            return True
        now = time.monotonic()
        if self._waiting is None or self._waiting[0].token != record.token:
            self._waiting = record, now
            left = self.place.stale_seconds - (age or 0.0)
            log.warning(
                "%s was in use %s by %s. This host cannot check whether that run is still alive: waiting up to %.0f "
                "seconds for a heartbeat, and taking the folder over if there is none.",
                self.where, "recently" if age is None else f"{age:.0f} s ago", _describe(record.owner), left,
            )  # fmt: skip
        elif self._waiting[0].heartbeat != record.heartbeat:
            raise FolderInUseError(self._refusal(record))
        return now - self._waiting[1] > self.place.stale_seconds

    def _refusal(self, record: Record, advice: str = "") -> str:
        age = self.place.age(record)
        heartbeat = "" if age is None else f", last heartbeat {max(age, 0.0):.0f} s ago"
        owner = record.owner
        advice = advice or f"Wait until it ends, stop it (`kill {owner.get('pid')}` on {owner.get('host')})"
        return (
            f"`save_folder` must not be in use by another run, got {self.where!r}: {_describe(owner)} saves there"
            f"{heartbeat}. {advice}, or choose another `save_folder` or `run_name`."
        )

    def check(self) -> None:
        """Check that the lease still belongs to this run. Call it before anything is written.

        For a remote store this takes some seconds at most: if it does not answer, training continues, and the upload
        fails.

        Raises:
            FolderInUseError: Another run has taken it over.
        """
        if self._owner is not None and self._lost is None:
            if isinstance(self.place, _LocalLeaseFile):
                with suppress(OSError):  # the folder cannot be read now; the save will fail
                    self._renew()
            elif self._checking is None or not self._checking.is_alive():
                self._checking = _in_thread(self._renew_once, _PATIENCE_SECONDS)
        self.check_lost()

    def check_lost(self) -> None:
        """Raise as `check` does, from the result of the last heartbeat, reading nothing."""
        if self._lost is not None:
            raise FolderInUseError(
                f"The run {self.run_name!r} no longer saves to {self.where!r}: {self._lost} has taken over the folder. "
                f"This happens when a process sends no heartbeat for {self.place.stale_seconds:.0f} seconds, for "
                f"example because it is suspended. Start this run again with another `save_folder`."
            )

    def release(self, *, wait: bool = True) -> None:
        """Release the lease; it may be taken again later. Safe to call twice.

        Args:
            wait: Wait some seconds for a remote store. Pass False if it is known to be down.
        """
        self._patience[0] = _PATIENCE_SECONDS if wait else 0.0
        release, self._finalizer = self._finalizer, None
        self._owner = self._lost = self._waiting = None
        self.active = False
        if release is not None:
            release()

    def _begin(self, owner: dict[str, Any]) -> None:
        self._owner, self._lost, self._waiting = owner, None, None
        _HELD[owner["token"]] = self
        stop = threading.Event()
        # Runs when this object is collected, at `release` or at exit, whichever comes first.
        self._finalizer = weakref.finalize(
            self, _release, self.place, owner["token"], stop, os.getpid(), self._patience
        )
        arguments = (weakref.ref(self), stop, self.place.heartbeat_seconds)
        with suppress(RuntimeError):  # the interpreter is about to end
            threading.Thread(target=_heartbeat_loop, args=arguments, name="composer-lease", daemon=True).start()

    def _renew(self) -> None:
        """Renew the lease, unless another run has taken it over."""
        owner = self._owner
        if owner is None or self._lost is not None:
            return
        record = self.place.read()
        if record is None:
            time.sleep(0.05)  # a launch that took another lease by mistake puts it back immediately
            record = self.place.read()
        if record is None:
            if self._owner is owner:
                self.place.create(owner)  # it was removed
        elif record.token == owner["token"]:
            self.place.renew(owner)
        elif self._owner is owner:
            self._mark_lost(_describe(record.owner))

    def _mark_lost(self, who: str) -> None:
        self._lost = who
        if self._finalizer is not None:
            self._finalizer.detach()

    def _renew_once(self) -> bool:
        """Renew the lease once; return True if there are to be more heartbeats."""
        try:
            self._renew()
        except Exception as error:  # noqa: BLE001 - training continues
            if not self._reported:
                self._reported = True
                log.warning("The lease on %s could not be renewed (reported once): %s", self.where, error)
        return self._lost is None


_HELD: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
"""The leases of this process by their tokens, which identify them in files: the lock table of a process is global."""


def folder_lease(folder: str, run_name: str, files: str) -> Lease:
    """Return the lease on a local folder.

    Args:
        folder: The folder; created if necessary when the lease is taken.
        run_name: The run.
        files: The pattern of the files that the run writes there. If it holds `{run_name}`, only runs of the same name
            exclude each other.
    """
    place = _LocalLeaseFile(Path(os.path.abspath(folder)) / _name(run_name, files))
    return Lease(place, folder, run_name, files.replace("{run_name}", run_name))


def remote_lease(storage: Storage, where: str, run_name: str, files: str) -> Lease:
    """Return the lease on a folder of a remote store; otherwise as `folder_lease`."""
    return Lease(
        _RemoteLeaseFile(storage, _name(run_name, files)), where, run_name, files.replace("{run_name}", run_name)
    )


def live_patterns(folder: Path, own: Lease | None) -> list[str]:
    """Return the patterns of the files that other runs are writing in a folder now."""
    patterns: list[str] = []
    for path in sorted(folder.glob(_NAME.format("*"))):
        place = _LocalLeaseFile(path)
        record = place.read()
        if record is None or (own is not None and own._owner is not None and record.token == own._owner["token"]):
            continue
        state = _state_of(record.owner)
        if state == "running" or (state == "unknown" and (place.age(record) or 0.0) <= place.stale_seconds):
            patterns.append(str(record.owner.get("files", "")))
    return patterns


def _name(run_name: str, files: str) -> str:
    if "{run_name}" not in files:
        return _NAME.format("")
    return _NAME.format(f"-{hashlib.sha256(run_name.encode()).hexdigest()[:12]}")


def _heartbeat_loop(reference: Callable[[], Lease | None], stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        lease = reference()
        if lease is None or not lease._renew_once():
            return
        del lease  # so that this thread does not keep it alive


def _release(
    place: _LocalLeaseFile | _RemoteLeaseFile, token: str, stop: threading.Event, pid: int, patience: list[float]
) -> None:
    stop.set()
    if os.getpid() != pid:
        return  # a forked process has nothing to release

    def remove() -> None:
        with suppress(Exception):  # the next launch finds that this process is gone
            place.remove(token)

    if isinstance(place, _LocalLeaseFile):
        remove()
        return
    _in_thread(remove, patience[0])


def _in_thread(call: Callable[[], object], seconds: float) -> threading.Thread:
    """Call a function that may hang in a thread, and wait for at most some seconds until it has returned."""
    thread = threading.Thread(target=call, name="composer-lease-call", daemon=True)
    with suppress(RuntimeError):  # the interpreter is about to end
        thread.start()
        thread.join(seconds)
    return thread


class _LocalLeaseFile:
    """Lease file in a local folder, or on a disk that several hosts mount."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heartbeat_seconds, self.stale_seconds = HEARTBEAT_SECONDS, STALE_SECONDS

    def read(self) -> Record | None:
        try:
            with open(self.path, "rb") as file:  # opening a file over NFS fetches its current content
                owner = _parsed(file.read())
                return Record(owner.get("token", ""), owner, os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return None

    def create(self, owner: dict[str, Any]) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(self.path)
        try:
            _write(temporary, owner, "wb")
            try:
                os.link(temporary, self.path)
            except FileExistsError:
                return temporary.stat().st_nlink == 2  # over NFS the reply to a success may be lost
            except OSError:  # a file system without hard links
                try:
                    _write(self.path, owner, "xb")
                except FileExistsError:
                    return False
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def take_over(self, record: Record, owner: dict[str, Any]) -> bool:
        """Rename the lease, which only one launch can do, and create a new one."""
        grabbed = temporary_path(self.path)
        try:
            os.rename(self.path, grabbed)
        except FileNotFoundError:
            return False  # another launch was faster
        try:
            if _parsed(grabbed.read_bytes()).get("token", "") != record.token:
                with suppress(FileExistsError):  # it belongs to the faster launch: put it back
                    link_or_copy(grabbed, self.path)
                return False
        finally:
            grabbed.unlink(missing_ok=True)
        return self.create(owner)

    def renew(self, owner: dict[str, Any]) -> None:
        os.utime(self.path)  # harmless if it belongs to another run by now

    def remove(self, token: str) -> None:
        record = self.read()
        if record is not None and record.token == token:
            self.path.unlink(missing_ok=True)

    def age(self, record: Record) -> float | None:
        """Return the seconds since the last heartbeat; both times are from the clock of the file server."""
        probe = temporary_path(self.path)
        try:
            probe.touch()
            return (probe.stat().st_mtime_ns - int(record.heartbeat)) / 1e9
        except OSError:
            return None
        finally:
            probe.unlink(missing_ok=True)


class _RemoteLeaseFile:
    """Lease file in a remote store.

    If the client offers a conditional write, one of two simultaneous launches wins. Otherwise each writes, waits a
    second and reads which was written last. A takeover always works the second way.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self.heartbeat_seconds, self.stale_seconds = REMOTE_HEARTBEAT_SECONDS, REMOTE_STALE_SECONDS
        self._beats = 0

    def read(self) -> Record | None:
        try:
            owner = _parsed(self.storage.read_bytes(self.name))
        except FileNotFoundError:
            return None
        if owner.get("released"):
            return None
        return Record(owner.get("token", ""), owner, owner.get("beats"))

    def create(self, owner: dict[str, Any]) -> bool:
        made = self.storage.write_new_text(self.name, self._content(owner))
        return self._won(owner) if made is None else made

    def take_over(self, record: Record, owner: dict[str, Any]) -> bool:
        now = self.read()
        if now is not None and (now.token != record.token or now.heartbeat != record.heartbeat):
            return False
        return self._won(owner)

    def _won(self, owner: dict[str, Any]) -> bool:
        self.storage.write_text(self.name, self._content(owner))
        time.sleep(_SETTLE_SECONDS)
        record = self.read()
        return record is not None and record.token == owner["token"]

    def renew(self, owner: dict[str, Any]) -> None:
        self._beats += 1
        self.storage.write_text(self.name, self._content(owner))

    def remove(self, token: str) -> None:
        record = self.read()
        if record is None or record.token != token:
            return
        try:
            self.storage.delete(self.name)
        except PermissionError:
            self.storage.write_text(self.name, json.dumps({"released": True}))

    def age(self, record: Record) -> float | None:
        return self.storage.seconds_since_written(self.name)

    def _content(self, owner: dict[str, Any]) -> str:
        return json.dumps({**owner, "beats": self._beats})


def _write(path: Path, owner: dict[str, Any], mode: str) -> None:
    with open(path, mode) as file:
        file.write(json.dumps(owner).encode())
        file.flush()
        os.fsync(file.fileno())


def _parsed(content: bytes) -> dict[str, Any]:
    """Parse a lease; empty if it is being written, or damaged: then its heartbeat decides."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


# ---- processes ----


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _text("/etc/machine-id"),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "process_start": _process(os.getpid())[0],
        "since": time.time(),
    }


def _is_same_process(owner: dict[str, Any]) -> bool:
    this = _this_process()
    return all(owner.get(key) == this[key] for key in this if key != "since")


def _state_of(owner: dict[str, Any]) -> str:
    """Return "running", "gone", or "unknown" for the process that owns a lease."""
    this = _this_process()
    if not owner or any(owner.get(key) != this[key] for key in ("host", "machine")):
        return "unknown"
    if owner.get("boot") != this["boot"]:
        # Without an id, two machines may share a name, as containers do.
        return "gone" if this["machine"] and this["boot"] else "unknown"
    if owner.get("namespace") != this["namespace"] or os.name != "posix":
        return "unknown"  # the number belongs to another process here
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "unknown"  # a process of another user, which may have got a recycled number
    except (KeyError, TypeError, ValueError, OverflowError):
        return "unknown"
    start, status = _process(int(owner["pid"]))
    if not start or not owner.get("process_start"):
        return "unknown"
    if start != owner["process_start"] or status in "ZX":
        return "gone"
    return "unknown" if status in "Tt" else "running"  # a stopped one may never continue


def _process(pid: int) -> tuple[str, str]:
    """Return the start of a process, in ticks since boot, and its status letter; empty strings if unreadable."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the name may contain blanks and brackets
    return (fields[19], fields[0]) if len(fields) > 19 else ("", "")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "a run whose lease cannot be read"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner.get("since", 0))))
    return (
        f"the run {owner.get('run_name')!r} on host {owner.get('host')!r} (process {owner.get('pid')}, since {since})"
    )
