"""A run on two machines continues after one of them died.

A machine is a network namespace: the two are joined by a cable (veth), and each has its own host name and processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.testing import deep_compare

PROGRAM = Path(__file__).with_name("machine_run.py")
SAVED, HELD = 8, 9  # the batch of the last checkpoint, and that after which a machine dies
BATCHES = 24
PORT = 29400  # nothing else is in a new network namespace
SECONDS = 210.0  # to train, or to notice a loss; a launch may wait 120 s for the lease of a machine that is gone
HOSTS = "127.0.0.1 localhost\n10.9.0.1 node0\n10.9.0.2 node1\n"
# For the processes of a launch: they cannot outlive the first one, which `--kill-child` ends with `unshare`.
OF_ITS_OWN = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]


class Machine:
    """A network namespace.

    Args:
        rank: The index of the machine.
        prefix: How to enter the user namespace of another machine; without it, this one gets a new one.
    """

    def __init__(self, rank: int, prefix: list[str]) -> None:
        self.rank = rank
        new = ["--net"] if prefix else ["--user", "--map-root-user", "--net"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.holder = subprocess.Popen([*prefix, "unshare", *new, "cat"], text=True, bufsize=1, **pipes)  # type: ignore[call-overload]
        self.holder.stdin.write("ready\n")
        if not self.holder.stdout.readline():  # `cat` answers from inside the namespace
            raise PermissionError(self.holder.communicate()[1].strip())
        self.entry = ["nsenter", f"--target={self.holder.pid}", "--user", "--preserve-credentials", "--net"]

    def call(self, *command: str) -> None:
        done = subprocess.run([*self.entry, *command], check=False, capture_output=True, text=True)
        if done.returncode:
            raise PermissionError(f"`{' '.join(command)}`: {done.stderr.strip()}")

    def set_cable(self, state: str) -> None:
        self.call("ip", "link", "set", "cable", state)

    def start(self, log: Path, *command: str) -> subprocess.Popen[bytes]:
        hosts = log.with_name("hosts")
        hosts.write_text(HOSTS)
        named = ["sh", "-ec", f'mount --bind {hosts} /etc/hosts; hostname node{self.rank}; exec "$@"', "sh"]
        # Otherwise a restarted agent of torchrun (2.14) waits forever for an address that no other one announces.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        arguments = [*self.entry, *OF_ITS_OWN, *named, *command]
        with open(log, "ab") as file:
            return subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def remove(self) -> None:
        self.holder.kill()
        self.holder.communicate()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines that reach each other and nothing else."""
    with contextlib.ExitStack() as stack:
        try:
            first = Machine(0, [])
            stack.callback(first.remove)
            second = Machine(1, first.entry)
            stack.callback(second.remove)
            peer = ["peer", "name", "cable", "netns", str(second.holder.pid)]
            first.call("ip", "link", "add", "cable", "type", "veth", *peer)
            for each in (first, second):
                each.call("ip", "address", "add", f"10.9.0.{each.rank + 1}/24", "dev", "cable")
                each.call("ip", "link", "set", "lo", "up")
                each.set_cable("up")
                each.call(*OF_ITS_OWN, "hostname", "node")
        except OSError as error:
            pytest.skip(f"network namespaces are not available: {error}")
        yield [first, second]


class Run:
    """A program on both machines, with a folder that both see."""

    def __init__(self, machines: list[Machine], folder: Path, launcher: list[str]) -> None:
        self.machines, self.folder, self.launcher = machines, folder, launcher
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        (folder / f"hold-{HELD}").touch()

    def start(self, rank: int) -> None:
        options = [option.format(rank=rank) for option in self.launcher]
        command = [sys.executable, "-m", *options, str(PROGRAM), str(self.folder)]
        self.processes[rank] = self.machines[rank].start(self._log(rank), *command)

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not all((self.folder / f"batch{HELD}-rank{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, self.output(0, 1)
            assert all(process.poll() is None for process in self.processes.values()), self.output(0, 1)
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        """End all processes on a machine at once, and let those on the other one train on."""
        pid = self.processes[rank].pid
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        os.kill(int(first), signal.SIGKILL)
        self.processes[rank].wait()  # until all have ended
        (self.folder / f"hold-{HELD}").unlink()

    def wait(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(SECONDS) for rank in ranks]

    def times(self, batch: int) -> int:
        """Return how often rank 0 trained a batch, in all launches."""
        return len((self.folder / f"batch{batch}-rank0").read_text())

    def output(self, *ranks: int) -> str:
        return "\n".join(self._log(rank).read_text() for rank in ranks)

    def _log(self, rank: int) -> Path:
        return self.folder / f"node{rank}.txt"


@pytest.fixture
def start(machines: list[Machine], tmp_path: Path) -> Iterator[Callable[[list[str]], Run]]:
    """A function that starts the program on both machines."""
    runs = []

    def begin(launcher: list[str]) -> Run:
        run = Run(machines, tmp_path, launcher)
        runs.append(run)
        for rank in (0, 1):
            run.start(rank)
        return run

    yield begin
    for process in (process for run in runs for process in run.processes.values()):
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of the same run in two processes on one machine, to which nothing happens."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [sys.executable, "-m", "composer", "-n", "2", str(PROGRAM), str(folder)]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert 0 == process.returncode, process.stdout + process.stderr
    return ended(folder)


def ended(folder: Path) -> dict[str, Any]:
    batches, weights = torch.load(folder / "ended.pt")
    assert batches == BATCHES
    return weights  # type: ignore[no-any-return]


COMPOSER = ["composer", "-n", "1", "--world_size", "2", "--node_rank", "{rank}"]
COMPOSER += ["--master_addr", "node0", "--master_port", str(PORT)]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "1", "--nnodes", "2", "--max-restarts", "3"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"node0:{PORT}"]


def test_the_relaunched_run_continues_after_a_power_cut(
    start: Callable[[list[str]], Run], machines: list[Machine], uninterrupted: dict[str, Any]
) -> None:
    run = start(COMPOSER)
    run.wait_until_held()
    machines[1].set_cable("down")  # no packet says that the processes ended
    run.kill(1)

    assert run.wait(0) == [1], run.output(0)
    assert "LostRankError: Rank 1 has not answered for 20 s, so rank 0 cannot continue" in run.output(0)

    machines[1].set_cable("up")
    for rank in (0, 1):
        run.start(rank)

    assert run.wait(0, 1) == [0, 0], run.output(0, 1)
    assert (run.times(SAVED), run.times(HELD)) == (1, 2)
    deep_compare(ended(run.folder), uninterrupted)


def test_under_torchrun_the_machine_that_is_left_waits_for_the_other_one(
    start: Callable[[list[str]], Run], uninterrupted: dict[str, Any]
) -> None:
    run = start(TORCHRUN)
    run.wait_until_held()
    run.kill(1)
    run.start(1)

    assert run.wait(0, 1) == [0, 0], run.output(0, 1)
    assert "LostRankError: Rank 1 is gone: the connection was closed while rank 0 waited" in run.output(0)
    assert (run.times(SAVED), run.times(HELD)) == (1, 2)
    deep_compare(ended(run.folder), uninterrupted)
