"""`run_on_ranks`: results, failures, and no process left behind."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.testing import restore_signals
from composer.testing._processes import run_on_ranks


class Point:
    """A class of a module that the processes can only import from its file."""

    def __init__(self, x: int) -> None:
        self.x = x


def rank() -> int:
    return int(os.environ["RANK"])


def shift(point: Point) -> Point:
    total = torch.tensor(rank())
    torch.distributed.all_reduce(total)
    return Point(point.x + int(total) + 10 * rank())


def describe() -> dict[str, Any]:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MARK".split()
    port = int(os.environ["MASTER_PORT"])
    return {
        **{name: os.environ.get(name) for name in names},
        "port": 0 < port < 65536,
        "threads": torch.get_num_threads(),
        "initialised": torch.distributed.is_initialized(),
    }


def fail_on_rank_1() -> None:
    if rank() == 1:
        raise KeyError("broken")
    torch.distributed.barrier()


class Unreadable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("needs two arguments")


def raise_unreadable() -> None:
    raise Unreadable(1, 2)


def die_on_rank_1() -> None:
    if rank() == 1:
        os._exit(3)
    torch.distributed.barrier()


def sleep_on_rank_1(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if rank() == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert [6, 16] == [point.x for point in run_on_ranks(shift, 2, Point(5))]


def test_arguments_may_be_of_a_module_that_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test module is not if pytest is started by its own command, although the function can be imported."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])

    assert [5, 5] == [point.x for point in run_on_ranks(copy.deepcopy, 2, Point(5), backend=None)]


def test_the_processes_are_described_as_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "seen")  # set after the fork server was started

    found = run_on_ranks(describe, backend=None)

    for index in range(2):
        expected = {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MARK": "seen",
            "port": True,
            "threads": 1,
            "initialised": False,
        }
        assert expected == found[index]


def test_a_failing_rank_is_named_with_its_traceback_and_exception() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Rank 1 failed\..*in fail_on_rank_1.*KeyError: 'broken'") as caught:
        run_on_ranks(fail_on_rank_1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_that_cannot_be_pickled_is_reported_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Rank 0 failed.*needs two arguments") as caught:
        run_on_ranks(raise_unreadable, 1)
    assert caught.value.__cause__ is None


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"Rank 1 failed\.\nThe process ended with exit code 3"):
        run_on_ranks(die_on_rank_1)


def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    # On a busy machine the other rank may not make it either.
    with pytest.raises(TimeoutError, match=r"The ranks \[(0, )?1\] did not finish within 2.0 seconds"):
        run_on_ranks(sleep_on_rank_1, 2, str(tmp_path), timeout=2.0, backend=None)

    assert not any(Path(f"/proc/{path.name}").exists() for path in tmp_path.iterdir())
    assert [] == multiprocessing.active_children()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_ignored_signals_end_processes_again_and_handlers_of_others_stay() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        restore_signals()
        assert signal.SIG_DFL is signal.getsignal(signal.SIGHUP)

        signal.signal(signal.SIGHUP, print)  # type: ignore[arg-type]
        restore_signals()
        assert print is signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
