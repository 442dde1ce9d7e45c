"""A rank that dies, raises, leaves or does not answer ends the whole job soon, and the last lines tell which it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed

from composer.distributed import LostRankError
from composer.distributed._lost_ranks import _TIMED_OUT_SECONDS, LostRankDetector
from composer.testing import run_on_ranks

HERE = Path(__file__).parent
COMPOSER = [sys.executable, "-m", "composer"]
SECONDS_TO_END = 30.0  # 10 are promised; a busy machine may take longer
TIMEOUT = 5.0


class Job:
    """The launcher with two ranks that train."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        command = [*COMPOSER, "-n", "2", str(HERE / "launched.py"), what, str(folder), str(TIMEOUT)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]
        self.err, self.ended = "", 0.0
        self.thread = threading.Thread(target=self._collect)
        self.thread.start()

    def _collect(self) -> None:
        _, self.err = self.process.communicate()
        self.ended = time.time()

    def wait(self) -> tuple[int, list[str]]:
        """The exit status, and what was written to stderr."""
        self.thread.join(timeout=120)
        return self.process.returncode, self.err.splitlines()

    def pids(self) -> list[int]:
        return [int((self.folder / f"pid{rank}").read_text()) for rank in range(2)]

    def assert_ended(self, allowed: float) -> None:
        """Check that the job ended in time after the failure and left no process."""
        seconds = self.ended - float((self.folder / "when").read_text())
        print(f"ended after {seconds:.1f} s, of {allowed:g}")  # `pytest -s` shows it

        assert 0 < seconds < allowed
        assert not any(map(is_running, self.pids()))


@pytest.fixture(scope="module", autouse=True)
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job with a rank that does not answer. Most of it is waiting, so it is started first and looked at last."""
    job = Job(tmp_path_factory.mktemp("silent"), "stop")
    yield job
    job.process.kill()
    job.thread.join()


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


# ---- in the middle of a fit


@pytest.mark.parametrize(
    ("what", "status", "end", "seen_by_other"),
    [
        (
            "raise",
            1,
            "exit code 1",
            "Rank 1 failed while rank 0 waited for it, with ValueError: this rank cannot go on",
        ),
        ("kill", 137, "killed by SIGKILL", "Rank 1 is gone: the connection was closed while rank 0 waited."),
    ],
)
def test_a_rank_that_fails_ends_the_job(tmp_path: Path, what: str, status: int, end: str, seen_by_other: str) -> None:
    job = Job(tmp_path, what)
    left, lines = job.wait()

    job.assert_ended(SECONDS_TO_END)
    assert left == status
    last = rf"composer: rank 1 on host \S+ \(pid {job.pids()[1]}\) failed: {end}\.( The other ranks were ended\.)?"
    told = re.fullmatch(last, lines[-1])
    assert told
    # Rank 0 knows soon, too: on a busy machine it has failed by itself when the launcher looks, so none is left to end.
    assert bool(told[1]) or lines[-2] == "composer: rank 0 failed too: exit code 1"
    title = next(i for i, line in enumerate(lines) if line.startswith("composer: the last lines of stderr of rank 1"))
    tail = [line for line in lines[title + 1 :] if line.startswith("  | ")]
    assert ("  | ValueError: this rank cannot go on" in tail) == (what == "raise")
    # On a machine so busy that rank 0 could not report within the seconds after SIGTERM, the launcher has killed it.
    killed = any(re.match(r"composer: rank 0 \(pid \d+\) did not exit after SIGTERM", line) for line in lines)
    assert killed or any(seen_by_other in line for line in lines[:title]), "\n".join(lines)


def test_signals_reach_the_ranks_which_save_and_leave(tmp_path: Path) -> None:
    job = Job(tmp_path, "train on")
    wait_for(*(tmp_path / f"trains{rank}" for rank in range(2)))
    (tmp_path / "when").write_text(str(time.time()))
    job.process.send_signal(signal.SIGTERM)
    status, lines = job.wait()

    job.assert_ended(SECONDS_TO_END)
    assert status == 143
    assert list((tmp_path / "saved").glob("ep*-ba*-rank0.pt"))
    assert "composer: SIGTERM is forwarded to the ranks" in "\n".join(lines)
    assert "failed" not in "\n".join(lines)


def test_a_rank_that_does_not_answer_is_named(silent: Job) -> None:
    status, lines = silent.wait()
    first, second = silent.pids()

    # The other rank waits for its partner, then for notes of others that may wait, too; only then it fails.
    silent.assert_ended(TIMEOUT + _TIMED_OUT_SECONDS + SECONDS_TO_END)
    assert status == 1
    assert re.fullmatch(rf"composer: rank 0 on host \S+ \(pid {first}\) failed: exit code 1\. .*ended\.", lines[-1])
    assert lines[-2].startswith(f"composer: rank 1 (pid {second}) did not exit after SIGTERM, and was killed; see ")
    assert re.search(r"\S+LostRankError: Rank 1 has not answered for 5 s, so rank 0 cannot continue\.", lines[-3])


# ---- who is missing


def who_is_missing(folder: str) -> list[str]:
    """Messages of a rank: one of three does not come; then all notice an error; then one fails for its own reasons."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    rank = torch.distributed.get_rank()
    attendance = LostRankDetector(rank, 3, 1.0)
    messages = []

    def note(body: str) -> None:
        try:
            with attendance.report(), attendance.report():
                if body == "exchange":
                    torch.distributed.all_reduce(torch.ones(1), group=group)
                if body == "lost":
                    raise RuntimeError("Connection closed by peer")
                if body == "own":
                    raise ValueError("of my own")
        except (RuntimeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")

    note("" if rank == 2 else "exchange")
    torch.distributed.barrier()
    note("lost")
    torch.distributed.barrier()
    note("own" if rank == 1 else "lost")
    return messages


def test_those_without_a_note_are_missing(tmp_path: Path) -> None:
    first, second, third = run_on_ranks(who_is_missing, 3, str(tmp_path))

    for rank, messages in enumerate((first, second)):
        expected = f"LostRankError: Rank 2 has not answered for 1 s, so rank {rank} cannot continue."
        assert messages[0].startswith(expected)
    for messages in (first[1:], second[1:], third):
        assert messages[0] == "RuntimeError: Connection closed by peer", "nobody is missing, so it is another error"
    for rank, messages in ((0, first[2:]), (2, third[1:])):
        waited = (
            f"LostRankError: Rank 1 failed while rank {rank} waited for it, with ValueError: of my own. See the log"
        )
        assert messages == [f"{waited} of rank 1."]
    assert second[2] == "ValueError: of my own"


def test_without_a_store_rank_zero_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: client)
    monkeypatch.delenv("COMPOSER_LAUNCHER_STORE", raising=False)
    del server
    attendance = LostRankDetector(1, 2, 5.0)
    expected = "Rank 0, which hosts the store, has exited or does not answer, so rank 1 cannot continue."

    with pytest.raises(LostRankError, match=expected), attendance.report():
        raise RuntimeError("Connection closed by peer")
    assert attendance.lost
