"""The ratio of step times: plain and method alternate in one process, for whole runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer.core import Callback, State
from composer.evidence.methods import make_algorithms
from composer.evidence.run import RunSpec, hold_machine, make_trainer, write_atomically
from composer.evidence.task import Task, load_task
from composer.loggers import Logger


@dataclass(frozen=True)
class StepTime:
    """Time of a method's run, divided by that of plain's with as many steps.

    Attributes:
        ratio: The ratio of the sums over all parts of the runs, each the median of the repeats.
        low: The smallest ratio of a repeat, or `ratio` if that is smaller.
        high: The largest, or `ratio` if that is larger.
        seconds: Time of plain's run.
        repeats: Number of repeats.
    """

    ratio: float
    low: float
    high: float
    seconds: float
    repeats: int


class _RoundRobinTimer(Callback):
    """Alternate between the runs of several threads every few batches, and measure the time of each turn."""

    def __init__(self, index: int, turns: threading.Condition, shared: dict[str, Any], block: int) -> None:
        self._index, self._turns, self._shared, self._block = index, turns, shared, block
        self.times: list[float] = []
        self._begin = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        self._wait(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self._block == 0:
            self._pass_on(state)
            self._wait(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self._block:
            self._pass_on(state)
        else:
            self._leave()

    def _wait(self, state: State) -> None:
        with self._turns:
            self._turns.wait_for(lambda: self._shared["turn"] == self._index or self._shared["done"])
        _synchronize(state)
        self._begin = time.perf_counter()

    def _pass_on(self, state: State) -> None:
        _synchronize(state)
        self.times.append(time.perf_counter() - self._begin)
        self._leave()

    def _leave(self) -> None:
        with self._turns:
            self._shared["turn"] = 1 - self._index
            self._turns.notify_all()

    def finish(self) -> None:
        """Let the other run continue without alternating: this one has ended, or failed."""
        with self._turns:
            self._shared["done"] = True
            self._turns.notify_all()


def step_time(task: Task, data: Any, plain: RunSpec, method: RunSpec, *, repeats: int = 3, block: int = 10) -> StepTime:
    """Train plain and a method in turns, and return the ratio of their times.

    Whole runs are measured, because some methods change the cost of a step over time. Start nothing else meanwhile.

    Args:
        task: The task.
        data: Its loaded data.
        plain: A run of plain.
        method: A run of the method with as many steps.
        repeats: Number of pairs of runs.
        block: Steps per turn.

    Raises:
        RuntimeError: A run failed.
    """
    times = [_interleave(task, data, (plain, method), block, seed) for seed in range(repeats)]
    slow = np.median([pair[1] for pair in times], axis=0).sum()
    base = np.median([pair[0] for pair in times], axis=0).sum()
    # The ratio of medians may lie outside the range of the repeats, if something disturbs one part of each.
    ratio = float(slow / base)
    ratios = [ratio, *(float(pair[1].sum() / pair[0].sum()) for pair in times)]
    return StepTime(ratio, min(ratios), max(ratios), float(base), repeats)


def _interleave(
    task: Task, data: Any, specs: Sequence[RunSpec], block: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    condition, shared = threading.Condition(), {"turn": seed % 2, "done": False}
    turns = [_RoundRobinTimer(index, condition, shared, block) for index in range(2)]
    problems: list[BaseException] = []

    def fit(trainer: Any, own: _RoundRobinTimer) -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 -- raised below, by the thread that waits
            problems.append(error)
        finally:
            own.finish()

    with ExitStack() as stack:
        threads = []
        for spec, own in zip(specs, turns, strict=True):
            # An untrained teacher takes the same time.
            algorithms = make_algorithms(spec.stack, partial(task.variants[spec.variant].model, data))
            run = make_trainer(task, data, replace(spec, seed=seed), algorithms, callbacks=[own])
            threads.append(threading.Thread(target=fit, args=(stack.enter_context(run)[0], own)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise RuntimeError(f"A run whose time is measured failed: {problems[0]}") from problems[0]
    return np.array(turns[0].times), np.array(turns[1].times)


def _synchronize(state: State) -> None:
    if state.device.name == "gpu":
        torch.cuda.synchronize()


def measure_in_process(reference: str, folder: str | None, texts: tuple[str, str], repeats: int, file: str) -> None:
    """Measure a ratio, alone on this machine, and write it to a file as JSON; the target of a process."""
    plain, method = (RunSpec.from_json(json.loads(text)) for text in texts)
    torch.set_num_threads(plain.threads)
    task = load_task(reference)
    data = task.data(Path(folder) if folder else None)
    try:
        with hold_machine(alone=True):
            values = vars(step_time(task, data, plain, method, repeats=repeats))
    except RuntimeError as error:
        values = {"error": str(error)}
    write_atomically(Path(file), json.dumps(values))
