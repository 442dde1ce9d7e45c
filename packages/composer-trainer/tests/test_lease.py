"""Two launches with one save folder: the second is refused, the first is unharmed, and nothing stale is in the way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sharded_runs import needs_sharding

from composer.checkpoint import FolderInUseError
from composer.checkpoint import lease as leases
from composer.checkpoint.lease import Lease, folder_lease, remote_lease
from composer.checkpoint.storage import storage_of
from composer.testing import deep_compare, run_on_ranks

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

    assert first.ask("check").startswith("lost The run 'run' saves nothing more to")
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


def test_a_second_launch_leaves_the_files_of_the_first_alone(make_trainer: Any, tmp_path: Path) -> None:
    def hashes(folder: Path) -> dict[str, str]:
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.pt")}

    options = {"run_name": "first", "save_interval": "2ba", "save_overwrite": True}
    undisturbed = make_trainer(save_folder=str(tmp_path / "alone"), **options)
    undisturbed.fit()
    trainer = make_trainer(save_folder=str(tmp_path / "alone"), **options)
    in_flight = tmp_path / "alone" / ".ep0-ba2-rank0.pt.0123abcd.saving"
    in_flight.write_text("being written")
    code = (
        "import torch; from composer.testing import SimpleModel; from composer.trainer import Trainer; "
        "m = SimpleModel();"
        f"Trainer(model=m, optimizers=torch.optim.SGD(m.parameters(), 0.1), max_duration='1ep', progress_bar=False, "
        f"device='cpu', run_name='other', save_folder={str(tmp_path / 'alone')!r}, save_overwrite=True)"
    )
    before = hashes(tmp_path / "alone")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "FolderInUseError: `save_folder` must not be in use by another run" in done.stderr
    assert in_flight.exists()
    assert before == hashes(tmp_path / "alone")
    trainer.fit()
    assert deep_compare(undisturbed.state.state_dict()["model"], trainer.state.state_dict()["model"]) is None
    assert before.keys() == hashes(tmp_path / "alone").keys()
    assert not in_flight.exists()  # of nobody, as it turned out: left over


def test_the_lease_is_there_while_a_run_trains_and_gone_after_it(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=str(tmp_path))
    assert [NAME] == os.listdir(tmp_path)
    trainer.fit()
    assert NAME not in os.listdir(tmp_path)
    trainer.save_checkpoint_to_save_folder()
    assert NAME not in os.listdir(tmp_path)
    trainer.fit(duration="1ep")
    trainer.close()
    assert NAME not in os.listdir(tmp_path)


def test_a_notebook_makes_a_second_trainer_without_closing_the_first(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(save_folder=str(tmp_path), run_name="one")
    second = make_trainer(save_folder=str(tmp_path), run_name="two")
    second.fit()

    assert 8 == second.state.timestamp.batch


def test_runs_whose_file_names_hold_their_names_share_a_folder(make_trainer: Any, tmp_path: Path) -> None:
    pattern = {"save_filename": "{run_name}-ba{batch}.pt", "save_latest_filename": "{run_name}-latest.pt"}
    one = make_trainer(save_folder=str(tmp_path), run_name="one", **pattern)
    two = make_trainer(save_folder=str(tmp_path), run_name="two", **pattern)
    foreign, own = (tmp_path / f".{name}-ba1.pt.0123abcd.saving" for name in ("two", "one"))
    foreign.touch()
    own.touch()
    one.fit()

    assert (True, False) == (foreign.exists(), own.exists())
    two.fit()
    assert not foreign.exists()


def _train_on_ranks(folder: str) -> tuple[list[str], str]:
    from conftest import MakeTrainer

    make = MakeTrainer()
    trainer = make(save_folder=folder, save_async=True, train_dataloader=make.loader(sampler=_sampler()))
    during = sorted(name for name in os.listdir(folder) if name.endswith(".lease"))
    trainer.fit()
    trainer.close()
    from composer.utils import dist

    if dist.get_global_rank() == 0:
        start = leases._process(os.getppid())[0]
        owner = {**leases._this_process(), "pid": os.getppid(), "token": "t", "process_start": start}
        (Path(folder) / NAME).write_text(json.dumps(owner))
    dist.barrier()
    try:
        make(save_folder=folder)
    except FolderInUseError as error:
        return during, str(error)[:60]
    return during, "not refused"


def _sampler() -> Any:
    from composer.testing import RandomClassificationDataset
    from composer.utils import dist

    return dist.get_sampler(RandomClassificationDataset(size=16), shuffle=False)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process started")
def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    expected = ([NAME], f"`save_folder` must not be in use by another run, got {str(tmp_path)!r}"[:60])

    assert [expected, expected] == run_on_ranks(_train_on_ranks, 2, str(tmp_path))


def _launched(folder: str, kind: str, signs: Path) -> subprocess.Popen[str]:
    launcher = ["-m", "composer", "-n", "2"] if kind in ("two ranks", "divided") else []
    program = str(Path(__file__).with_name("leased.py"))
    command = [sys.executable, *launcher, program, folder, kind, str(signs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process started")
@pytest.mark.parametrize(
    ("kind", "dies"),
    [("one process", True), ("two ranks", False), pytest.param("divided", True, marks=needs_sharding),
     ("remote store", False)],
)  # fmt: skip
def test_a_second_launch_is_refused_and_a_relaunch_follows_the_end_of_the_first(
    kind: str, dies: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "remote store":
        pytest.importorskip("s3fs")
    folder = f"{request.getfixturevalue('s3')}/run" if kind == "remote store" else str(tmp_path / "saved")
    first = _launched(folder, kind, tmp_path)
    while not (tmp_path / "pid").exists():
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    second = _launched(folder, kind, tmp_path)
    text, _ = second.communicate()

    assert 0 != second.returncode
    assert f"the run 'run' on host {socket.gethostname()!r} (process {pid}, since" in text
    if dies:
        os.kill(pid, signal.SIGKILL)
    else:
        (tmp_path / "go").touch()
    text, _ = first.communicate()
    assert dies == (0 != first.returncode), text
    if not dies:
        assert [0, 6] == json.loads((tmp_path / "ended").read_text())
    (tmp_path / "go").touch()
    third = _launched(folder, kind, tmp_path)
    text, _ = third.communicate()
    assert 0 == third.returncode, text
    began, ended = json.loads((tmp_path / "ended").read_text())
    assert 6 == ended
    assert began < 3 if dies else began == 6, began
    if dies and kind != "remote store":  # whose uploads the kill may have cut off
        assert 2 == began
