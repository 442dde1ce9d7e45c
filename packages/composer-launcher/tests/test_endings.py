"""How a job ends: who is told, who is killed, which failure is named as the cause."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer.cli._failures import Ended, describe, root_cause, status_of
from composer.cli.launcher import main

ACTOR = str(Path(__file__).with_name("actor.py"))
COMPOSER = [sys.executable, "-m", "composer"]
SECONDS_TO_END = 30.0  # 10 are promised; a busy machine may take longer


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and (path.stat().st_size or not path.name.startswith("ready")) for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        time.sleep(0.02)


def test_ranks_that_do_not_leave_are_killed_with_their_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["-n", "2", ACTOR, "stubborn", str(tmp_path)])
    seconds = time.time() - float((tmp_path / "when").read_text())
    children = [int((tmp_path / f"child{rank}").read_text()) for rank in range(2)]

    assert status == 1
    assert seconds < SECONDS_TO_END
    assert not any(map(is_running, children))
    last = capfd.readouterr().err.splitlines()[-3:]
    assert last[0] == "  | RuntimeError: rank 1 is broken"
    assert re.fullmatch(r"composer: rank 0 \(pid \d+\) did not leave when it was told to, and was killed", last[1])
    assert re.fullmatch(r"composer: rank 1 on host \S+ \(pid \d+\) failed: exit code 1\. .*", last[2])


def test_the_cause_is_told_and_not_what_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 leaves first, but only because it missed rank 1."""
    assert main(["-n", "2", ACTOR, "lonely", str(tmp_path)]) == 5
    last = capfd.readouterr().err.splitlines()[-2:]
    assert last[0] == "composer: rank 0 failed too: exit code 1"
    assert re.fullmatch(r"composer: rank 1 on host \S+ \(pid \d+\) failed: exit code 5\.", last[1])


@pytest.mark.parametrize(
    ("options", "numbers", "told"),
    [
        ([], (signal.SIGINT, signal.SIGINT), "SIGINT is passed on to the ranks, which may take 30 s to save and leave"),
        (["--shutdown_timeout", "0.2"], (signal.SIGHUP,), "1 ranks did not leave in 0.2 s."),
    ],
)
def test_ranks_that_ignore_an_order_to_leave_are_killed_in_the_end(
    tmp_path: Path, options: list[str], numbers: tuple[int, ...], told: str
) -> None:
    command = [*COMPOSER, "-n", "1", *options, ACTOR, "patient", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_for(tmp_path / "ready0")
        said = ""
        begun = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            said += process.stderr.readline()
        said += process.stderr.read()

    assert process.returncode == 137
    assert time.monotonic() - begun < SECONDS_TO_END
    assert told in said
    assert not is_running(int((tmp_path / "ready0").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
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


def ended(rank: int, code: int, at: float, *tail: str) -> Ended:
    return Ended(rank=rank, pid=1, code=code, time=at, tail=tail, log=None)


LOST = "composer.distributed.LostRankError: Rank 1 is gone"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([ended(0, 1, 1.0, "ValueError: x"), ended(1, 1, 2.0, "ValueError: y")], 0),
        ([ended(0, 1, 1.0, LOST), ended(1, -9, 1.0)], 1),
        ([ended(0, 1, 1.0, CLOSED), ended(1, 1, 2.0, "ValueError: y", "  of two lines")], 1),
        ([ended(0, -6, 1.0, "[E] Watchdog caught collective operation timeout", "frame"), ended(1, -9, 2.0)], 1),
        ([ended(0, 1, 1.0, CLOSED, "During handling", "ValueError: own"), ended(1, 2, 2.0)], 0),
        ([ended(0, 1, 1.0, "ValueError: x", "The above", LOST), ended(1, -11, 2.0, CLOSED)], 1),
        ([ended(0, 1, 2.0, LOST), ended(1, 1, 1.0, CLOSED)], 1),
    ],
)
def test_the_cause_is_the_first_failure_that_follows_from_no_other(failures: list[Ended], cause: int) -> None:
    assert root_cause(failures).rank == cause


def test_ends_have_names_and_statuses() -> None:
    assert [describe(3), describe(-9), describe(-60)] == ["exit code 3", "killed by SIGKILL", "killed by signal 60"]
    assert [status_of(0), status_of(3), status_of(-9)] == [0, 3, 137]
