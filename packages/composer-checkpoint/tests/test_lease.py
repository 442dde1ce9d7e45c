"""Two launches with one save folder: the second is refused, the first is unharmed, and nothing stale is in the way."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem

from composer.checkpoint import FolderInUseError
from composer.checkpoint import lease as leases
from composer.checkpoint.lease import Lease
from composer.checkpoint.storage import Storage, storage_of

NAME = ".composer.owner"
PROGRAM = """
import multiprocessing, sys, time
from composer.checkpoint.lease import FolderInUseError, Lease
for line in sys.stdin:
    what, *where = line.split()
    answer = what
    try:
        if what == "take":
            lease = Lease(where[0], "run", "ep{epoch}.pt")
            lease.acquire()
        elif what == "fork":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(10,), daemon=True).start()
        elif what == "save":
            lease.check(saving=True)
        else:
            lease.release()
    except FolderInUseError as error:
        answer = f"refused {error}"
    print(answer, flush=True)
"""


class Launch:
    """Another process that takes and releases leases when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        self.tell(what)
        return self.answer()


@pytest.fixture(scope="module")
def launches() -> Iterator[list[Launch]]:
    """Several processes, which tests share because each imports torch."""
    made = [Launch() for _ in range(3)]
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A folder on a disk, and one in a store; `_lease_in` makes a lease on it."""
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.01)
    return storage_of(str(tmp_path) if request.param == "folder" else "memory://bucket/run")


def _lease_in(store: Storage) -> Lease:
    return Lease(store.uri(NAME).rpartition("/")[0].removeprefix("file://"), "run", "ep{epoch}.pt")


def _write_of_other_host(store: Storage, seconds_ago: float, **more: Any) -> None:
    record = {"token": "t", "host": "elsewhere", "pid": 7, "since": 0, "run_name": "theirs"}
    store.write_text(NAME, json.dumps({**record, "renewed": time.time() - seconds_ago, **more}))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_of_two_simultaneous_launches_exactly_one_wins_and_is_named(
    scheme: str, launches: list[Launch], tmp_path: Path
) -> None:
    several = launches[:2]
    for _ in range(5):
        for one in several:
            one.tell(f"take {scheme}{tmp_path}")
        answers = [one.answer() for one in several]
        assert ["refused", "take"] == sorted(answer.split()[0] for answer in answers)
        winner = answers.index("take")
        assert f"(process {several[winner].process.pid}, since" in answers[1 - winner]
        assert "release" == several[winner].ask("release")


def test_a_suspended_run_is_in_use(launches: list[Launch], tmp_path: Path) -> None:
    first = launches[0]
    first.ask(f"take {tmp_path}")
    os.kill(first.process.pid, signal.SIGSTOP)
    rule = rf"the run 'run' on host '.+' \(process {first.process.pid}, since .+\) saves there, last renewed \d+ s"
    with pytest.raises(FolderInUseError, match=rule):
        Lease(str(tmp_path), "run", "ep{epoch}.pt").acquire()
    os.kill(first.process.pid, signal.SIGCONT)

    assert "save" == first.ask("save")
    first.ask("release")


def test_of_two_simultaneous_relaunches_of_a_killed_run_exactly_one_wins(
    launches: list[Launch], tmp_path: Path
) -> None:
    *several, killed = launches
    assert "take" == killed.ask(f"take {tmp_path}")
    assert "fork" == killed.ask("fork")  # as a worker of a DataLoader, which outlives it for some seconds
    killed.process.kill()
    os.waitid(os.P_PID, killed.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    for one in several:
        one.tell(f"take {tmp_path}")
    assert ["refused", "take"] == sorted(one.answer().split()[0] for one in several)


def test_a_lease_without_an_owner_on_this_host_is_taken_over_at_once(store: Storage) -> None:
    lease = _lease_in(store)
    lease.acquire()
    del lease
    gc.collect()  # errors of a store's client keep frames alive

    _lease_in(store).acquire()


def test_a_run_whose_lease_was_taken_over_saves_nothing_more(store: Storage) -> None:
    lease = _lease_in(store)
    lease.acquire()
    lease.check(saving=True)
    _write_of_other_host(store, 0)

    with pytest.raises(FolderInUseError, match=r"The run 'run' no longer saves to .+ 'theirs' on host 'elsewhere'"):
        lease.check(saving=True)
    lease.release()
    assert [NAME] == store.find()  # theirs


def test_a_lease_of_another_host_is_taken_over_once_it_is_silent(
    store: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    _write_of_other_host(store, leases.STALE_SECONDS + 1)
    lease = _lease_in(store)

    lease.acquire()
    assert "'theirs' on host 'elsewhere' (process 7, since 1970" in caplog.text
    lease.release()
    assert [] == store.find()


def test_a_lease_of_another_host_is_respected_once_it_is_renewed(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_of_other_host(store, 30)
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: _write_of_other_host(store, 0))

    with pytest.raises(FolderInUseError, match="the run 'theirs' on host 'elsewhere'"):
        _lease_in(store).acquire()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"renewed": 1e12}'])
def test_a_record_without_a_usable_time_is_watched(
    content: str, store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_text(NAME, content)
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.05)
    _lease_in(store).acquire()

    assert "This process cannot tell whether that run is alive" in caplog.text


def test_a_lock_that_another_host_holds_is_awaited_and_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file server with common locks, which keeps those of a host that has died for a while."""
    _write_of_other_host(storage_of(str(tmp_path)), 30)
    lock = FileLock(tmp_path / ".composer.lock")
    lock.acquire()
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.0)
    lease = Lease(str(tmp_path), "run", "ep{epoch}.pt")
    with pytest.raises(FolderInUseError, match=r"'elsewhere'.+if its host is gone, remove '.+\.composer\.lock'"):
        lease.acquire()
    monkeypatch.setattr(leases, "STALE_SECONDS", 120.0)
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: lock.release())
    _write_of_other_host(storage_of(str(tmp_path)), 119.9)

    lease.acquire()


def test_without_locks_in_the_file_system_the_record_decides(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, **arguments: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(FileLock, "acquire", fail)
    first = _lease_in(store)
    first.acquire()
    leases._HELD.clear()  # as in another process
    second = _lease_in(store)
    with monkeypatch.context() as patched:
        patched.setattr(leases.time, "sleep", lambda seconds: first.check(saving=True))
        with pytest.raises(FolderInUseError, match="the run 'run'"):
            second.acquire()
    first.release()
    second.acquire()


def test_a_record_that_somebody_removed_is_made_again(store: Storage) -> None:
    lease = _lease_in(store)
    lease.acquire()
    store.delete(NAME)
    lease.check(saving=True)

    assert [NAME] == [name for name in store.find() if not name.endswith(".lock")]


def test_a_run_that_was_silent_does_not_take_back_a_folder_whose_new_owner_has_ended(store: Storage) -> None:
    lease = _lease_in(store)
    lease.acquire()
    store.delete(NAME)  # by the other run, when it has ended
    lease._written -= leases.STALE_SECONDS + 1

    with pytest.raises(FolderInUseError, match="a run that has ended meanwhile has taken over the folder"):
        lease.check(saving=True)
    assert not [name for name in store.find() if not name.endswith(".lock")]
    lease.release()


def test_a_store_that_removes_nothing_keeps_a_record_that_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Storage, name: str) -> None:
        raise PermissionError(name)

    store = storage_of("memory://bucket/run")
    monkeypatch.setattr(Storage, "delete", refuse)
    with caplog.at_level(logging.WARNING):
        for host in ("one", "other"):
            monkeypatch.setattr(leases.socket, "gethostname", lambda host=host: host)
            lease = _lease_in(store)
            lease.acquire()
            lease.release()
    assert [NAME] == store.find()
    assert "" == caplog.text


def test_within_one_process_the_newest_lease_takes_the_folder_over(store: Storage) -> None:
    first, second = _lease_in(store), _lease_in(store)
    first.acquire()
    second.acquire()

    with pytest.raises(FolderInUseError, match="a newer Trainer of this process has taken over"):
        first.check()
    first.acquire()
