"""Two launches with one save folder: the second is refused, the first is unharmed, and nothing stale is in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer.checkpoint import FolderInUseError
from composer.checkpoint import lease as leases
from composer.checkpoint.lease import Lease, folder_lease, remote_lease
from composer.checkpoint.storage import storage_of

NAME = ".composer.lease"
PROGRAM = """
import sys
from composer.checkpoint import FolderInUseError
from composer.checkpoint.lease import folder_lease
folder = sys.argv[1]
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "take":
        lease = folder_lease(folder, "run", "ep{epoch}.pt")
        try:
            taken = lease.try_acquire()
            while not taken:
                taken = lease.try_acquire()
            print("taken", flush=True)
        except FolderInUseError as error:
            print("refused", str(error), flush=True)
    elif line.strip() == "check":
        try:
            lease.check()
            print("held", flush=True)
        except FolderInUseError as error:
            print("lost", str(error), flush=True)
    else:
        lease.release()
        print("released", flush=True)
"""


class Launch:
    """Another process that takes and releases leases when told."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.answer()

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


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], Launch]]:
    made: list[Launch] = []

    def make() -> Launch:
        made.append(Launch(tmp_path))
        return made[-1]

    yield make
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


def _lease_on(folder: Path) -> Lease:
    return folder_lease(str(folder), "run", "ep{epoch}.pt")


def _write_of_other_host(folder: Path, seconds_ago: float) -> Path:
    path = folder / NAME
    path.write_text(json.dumps({"token": "t", "host": "elsewhere", "pid": 7, "since": 0, "run_name": "theirs"}))
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


def test_of_two_simultaneous_launches_exactly_one_wins(launch: Callable[[], Launch]) -> None:
    several = [launch(), launch()]
    for _ in range(10):
        for one in several:
            one.tell("take")
        answers = [one.answer().split()[0] for one in several]
        assert ["refused", "taken"] == sorted(answers)
        assert "released" == several[answers.index("taken")].ask("release")


def test_of_two_simultaneous_relaunches_of_a_killed_run_exactly_one_wins(launch: Callable[[], Launch]) -> None:
    several = [launch(), launch()]
    for _ in range(3):
        killed = launch()
        assert "taken" == killed.ask("take")
        killed.process.kill()
        os.waitid(os.P_PID, killed.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        for one in several:
            one.tell("take")
        answers = [one.answer().split()[0] for one in several]
        assert ["refused", "taken"] == sorted(answers)
        assert "released" == several[answers.index("taken")].ask("release")


def test_the_error_names_the_first_run(launch: Callable[[], Launch], tmp_path: Path) -> None:
    first = launch()
    first.ask("take")
    rule = rf"the run 'run' on host '.+' \(process {first.process.pid}, since .+\) saves there, last heartbeat \d+ s"
    with pytest.raises(FolderInUseError, match=rule):
        _lease_on(tmp_path).try_acquire()


def test_a_suspended_run_whose_lease_was_taken_over_saves_nothing_more(
    launch: Callable[[], Launch], tmp_path: Path
) -> None:
    first = launch()
    first.ask("take")
    os.kill(first.process.pid, signal.SIGSTOP)
    while leases._process(first.process.pid)[1] not in "Tt":
        time.sleep(0.01)
    lease = _lease_on(tmp_path)
    assert not lease.try_acquire()  # it may go on: wait for its heartbeat
    os.utime(tmp_path / NAME, (0, 0))
    assert lease.try_acquire()
    os.kill(first.process.pid, signal.SIGCONT)

    assert first.ask("check").startswith("lost The run 'run' no longer saves to")
    lease.check()
    lease.release()
    assert [] == os.listdir(tmp_path)


def test_a_lease_of_another_host_is_taken_over_once_its_heartbeat_is_old(tmp_path: Path) -> None:
    _write_of_other_host(tmp_path, leases.STALE_SECONDS + 1)

    assert _lease_on(tmp_path).try_acquire()


def test_a_lease_of_another_host_is_respected_once_there_is_a_heartbeat(tmp_path: Path) -> None:
    path = _write_of_other_host(tmp_path, 30)
    lease = _lease_on(tmp_path)
    assert not lease.try_acquire()
    os.utime(path)

    with pytest.raises(FolderInUseError, match="the run 'theirs' on host 'elsewhere'"):
        lease.try_acquire()


def test_a_recycled_process_id_and_another_boot_are_no_obstacle(tmp_path: Path) -> None:
    this = leases._this_process()
    if not this["process_start"]:
        pytest.skip("this system does not tell when a process started")
    assert "gone" == leases._state_of({**this, "process_start": "1"})
    assert "running" == leases._state_of(this)
    assert ("gone" if this["machine"] else "unknown") == leases._state_of({**this, "boot": "another"})
    assert "unknown" == leases._state_of({**this, "namespace": "pid:[1]"})


def test_a_damaged_lease_is_judged_by_its_age(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text("")
    assert not _lease_on(tmp_path).try_acquire()
    os.utime(path, (0, 0))

    assert _lease_on(tmp_path).try_acquire()


def test_a_lease_that_is_not_utf8_is_judged_by_its_age_on_any_store(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xff{}")
    storage = storage_of("memory://bucket/run")
    filesystem, root = storage._filesystem()
    filesystem.pipe_file(f"{root}/{NAME}", b"\xff{}")
    for lease in (_lease_on(tmp_path), remote_lease(storage, "memory://bucket/run", "run", "ep{epoch}.pt")):
        assert not lease.try_acquire()
        lease.place.stale_seconds = -1.0
        assert lease.try_acquire()
        lease.release()

    assert ([], []) == (os.listdir(tmp_path), storage.find())


def test_a_lease_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    lease = _lease_on(tmp_path)
    assert lease.try_acquire()
    (tmp_path / NAME).unlink()
    lease.check()

    assert (tmp_path / NAME).exists()


def test_on_a_remote_store_too_the_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of("memory://bucket/run")
    first = remote_lease(storage, "memory://bucket/run", "run", "ep{epoch}.pt")
    assert first.try_acquire()
    content = json.loads(storage.read_text(NAME))
    storage.write_text(NAME, json.dumps({**content, "host": "elsewhere"}))
    second = remote_lease(storage, "memory://bucket/run", "run", "ep{epoch}.pt")
    assert not second.try_acquire()
    first._renew()
    content = json.loads(storage.read_text(NAME))
    storage.write_text(NAME, json.dumps({**content, "host": "elsewhere"}))

    with pytest.raises(FolderInUseError, match="last heartbeat"):
        second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    assert [] == storage.find()
