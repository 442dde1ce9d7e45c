"""Replica groups as processes that a test can kill, and a Lighthouse for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import replica_run
import torch

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["replica_run", "torchft"])  # imports torch and the Trainer once


@contextmanager
def lighthouse(port: int = 0) -> Iterator[str]:
    """Run a Lighthouse that notices a death within a second; yield its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"[::]:{port}", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1000)
    try:
        yield server.address()
    finally:
        server.shutdown()


class Groups:
    """Replica groups.

    Args:
        number: How many.
        address: That of the Lighthouse.
        ranks: Processes in each group.
        **options: Arguments of `replica_run.main`.
    """

    def __init__(self, number: int, address: str, ranks: int = 1, **options: Any) -> None:
        self.number, self.address, self.ranks, self.options = number, address, ranks, options
        self.processes: dict[int, list[Any]] = {}
        for group in range(number):
            self.start(group)

    def start(self, group: int) -> None:
        environment = {"NUM_REPLICA_GROUPS": self.number, "REPLICA_GROUP_ID": group, "TORCHFT_LIGHTHOUSE": self.address}
        if self.ranks > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1]}
            environment |= {"WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
        self.processes[group] = []
        for rank in range(self.ranks):
            own = environment | {"RANK": rank, "LOCAL_RANK": rank}
            self.processes[group].append(_processes.Process(target=_run, args=(own, self.options), daemon=True))
            self.processes[group][-1].start()

    def kill(self, group: int, rank: int = 0) -> None:
        """Kill a process; `torchrun` would end the others of its group."""
        self.processes[group][rank].kill()
        self.processes[group][rank].join()
        self.end(group)

    def end(self, group: int) -> None:
        for process in self.processes[group]:
            process.kill()
            process.join()

    def wait(self, seconds: float = 90.0, restarts: bool = False) -> None:
        """Wait until all have finished.

        Args:
            seconds: How long.
            restarts: Start a group again if it ends with an error.
        """
        deadline = time.monotonic() + seconds
        while any(process.exitcode != 0 for processes in self.processes.values() for process in processes):
            assert time.monotonic() < deadline
            failed = self.failed()
            assert restarts or not failed, f"groups {failed} ended with an error"
            for group in failed:
                self.end(group)
                self.start(group)
            time.sleep(0.05)

    def failed(self) -> list[int]:
        return [group for group, each in self.processes.items() if any(p.exitcode not in (None, 0) for p in each)]

    def diary(self, group: int, rank: int = 0) -> list[list[Any]]:
        """Return the lines of `replica_run.Diary`."""
        path = Path(self.options["folder"], f"group{group}.{rank}.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def weights(self, group: int) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(Path(self.options["folder"], f"group{group}.pt"))
        return loaded


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _run(environment: dict[str, Any], options: dict[str, Any]) -> None:
    os.environ |= {"RUST_LOG": "error"} | {name: str(value) for name, value in environment.items()}
    torch.set_num_threads(1)
    replica_run.main(**options)
