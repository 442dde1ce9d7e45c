"""The end of a job: which ranks get a signal, which are killed, and which failure is reported as the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer.cli._job import ExitedRank, describe, exit_status, root_cause
from composer.cli.launcher import main

ACTOR = str(Path(__file__).with_name("actor.py"))
COMPOSER = [sys.executable, "-m", "composer"]
SECONDS_TO_END = 30.0  # documented: 10; a busy machine may take longer


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and (path.stat().st_size or not path.name.startswith("ready")) for path in paths):
        assert time.monotonic() < deadline, f"{paths} were not written"
        time.sleep(0.02)


def test_ranks_that_do_not_exit_are_killed_with_their_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["-n", "2", ACTOR, "stubborn", str(tmp_path)])
    seconds = time.time() - float((tmp_path / "when").read_text())
    children = [int((tmp_path / f"child{rank}").read_text()) for rank in range(2)]

    assert status == 1
    assert seconds < SECONDS_TO_END
    while any(map(is_running, children)):  # the kernel ends them after the signal, which is sent
        assert time.time() - float((tmp_path / "when").read_text()) < SECONDS_TO_END
        time.sleep(0.02)
    last = capfd.readouterr().err.splitlines()[-3:]
    assert last[0] == "  | RuntimeError: rank 1 is broken"
    assert re.fullmatch(r"composer: rank 0 \(pid \d+\) did not exit after SIGTERM, and was killed", last[1])
    assert re.fullmatch(r"composer: rank 1 on host \S+ \(pid \d+\) failed: exit code 1\. .*", last[2])


def test_the_cause_is_reported_and_not_its_consequence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 exits first, but only because rank 1 is gone."""
    assert main(["-n", "2", ACTOR, "lonely", str(tmp_path)]) == 5
    last = capfd.readouterr().err.splitlines()[-2:]
    assert last[0] == "composer: rank 0 failed too: exit code 1"
    assert re.fullmatch(r"composer: rank 1 on host \S+ \(pid \d+\) failed: exit code 5\.", last[1])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts jobs in the background with SIGINT ignored, `nohup` with SIGHUP, which their processes inherit."""
    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("options", "numbers", "message"),
    [
        ([], (signal.SIGINT, signal.SIGINT), "SIGINT is forwarded to the ranks, which have 30 s to save and exit"),
        (["--shutdown_timeout", "0.2"], (signal.SIGHUP,), "1 ranks did not exit within 0.2 s"),
    ],
)
def test_ranks_that_ignore_signals_are_killed_in_the_end(
    tmp_path: Path, options: list[str], numbers: tuple[int, ...], message: str
) -> None:
    command = [*COMPOSER, "-n", "1", *options, ACTOR, "patient", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_for(tmp_path / "ready0")
        printed = ""
        begun = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            printed += process.stderr.readline()
        printed += process.stderr.read()

    assert process.returncode == 137
    assert time.monotonic() - begun < SECONDS_TO_END
    assert message in printed
    assert not is_running(int((tmp_path / "ready0").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can kill a process when its parent exits")
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([*COMPOSER, "-n", "2", ACTOR, "patient", str(tmp_path)])
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + SECONDS_TO_END
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- which failure is the cause


def exited(rank: int, code: int, at: float, *tail: str) -> ExitedRank:
    return ExitedRank(rank=rank, pid=1, code=code, time=at, tail=tail, log=None)


LOST = "composer.distributed.LostRankError: Rank 1 is gone"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([exited(0, 1, 1.0, "ValueError: x"), exited(1, 1, 2.0, "ValueError: y")], 0),
        ([exited(0, 1, 1.0, LOST), exited(1, -9, 1.0)], 1),
        ([exited(0, 1, 1.0, CLOSED), exited(1, 1, 2.0, "ValueError: y", "  of two lines")], 1),
        ([exited(0, -6, 1.0, "[E] Watchdog caught collective operation timeout", "frame"), exited(1, -9, 2.0)], 1),
        ([exited(0, 1, 1.0, CLOSED, "During handling", "ValueError: own"), exited(1, 2, 2.0)], 0),
        ([exited(0, 1, 1.0, "ValueError: x", "The above", LOST), exited(1, -11, 2.0, CLOSED)], 1),
        ([exited(0, 1, 2.0, LOST), exited(1, 1, 1.0, CLOSED)], 1),
    ],
)
def test_the_cause_is_the_first_failure_that_is_no_consequence_of_another(
    failures: list[ExitedRank], cause: int
) -> None:
    assert root_cause(failures).rank == cause


def test_return_codes_have_descriptions_and_exit_statuses() -> None:
    assert [describe(3), describe(-9), describe(-60)] == ["exit code 3", "killed by SIGKILL", "killed by signal 60"]
    assert [exit_status(0), exit_status(3), exit_status(-9)] == [0, 3, 137]


def replicas(folder: Path, name: str, **options: Any) -> subprocess.Popen[str]:
    command = [*COMPOSER, "--replicas", "2", "-n", "1", "--max_restarts", "1", ACTOR, "replica", str(folder), name]
    nodes = {"WORLD_SIZE": "4", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    environment = {**os.environ, **nodes, "TORCHFT_LIGHTHOUSE": "http://given"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.parametrize(
    ("name", "status", "end"),
    [
        ("succeeds", 0, ", but another one has finished the run"),
        ("always", 3, " and is not started again"),
    ],
)
def test_replica_groups_that_fail_are_started_again(tmp_path: Path, name: str, status: int, end: str) -> None:
    with replicas(tmp_path, name) as process:
        _, printed = process.communicate()
        assert process.returncode == status
    assert {path.read_text() for path in tmp_path.glob("ready*")} == {"http://given, rank 0 of 1"}
    assert len([*tmp_path.glob("ready*")]) == 3 or name == "always"  # which ends the third one at its start
    assert re.search("composer: replica group . failed with exit status 3 and is started again, 1/1.", printed)
    assert re.search(f"composer: replica group . failed with exit status 3{end}.", printed)
    assert ("so all end" in printed) == (name == "always")


def test_replica_groups_may_fail_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one fails when the first one, which was started again, has the state of the run."""
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://given")
    monkeypatch.setattr("composer.cli._replicas._START_SECONDS", 0.0)
    assert main(["--replicas", "2", "-n", "1", ACTOR, "replica", str(tmp_path), "turns"]) == 0
    assert len([*tmp_path.glob("ready*")]) == 4


def test_replica_groups_get_a_signal_and_are_not_started_again(tmp_path: Path) -> None:
    with replicas(tmp_path, "signals") as process:
        while len([*tmp_path.glob("ready*")]) < 2:
            time.sleep(0.02)
        process.terminate()
        _, printed = process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
    assert "started again" not in printed
    assert len([*tmp_path.glob("ready*")]) == 2


def test_replica_groups_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with replicas(tmp_path, "signals") as process:
        while len([*tmp_path.glob("ready*")]) < 2:
            time.sleep(0.02)
        process.kill()
    for path in tmp_path.glob("ready*"):
        while is_running(int(path.suffix[1:])):
            time.sleep(0.02)


def test_replica_groups_without_a_lighthouse_need_torchft(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    assert main(["--replicas", "2", "-n", "1", ACTOR]) == 2
    assert "composer: error: `--replicas` needs torchft. Install it with `pip" in capfd.readouterr().err
