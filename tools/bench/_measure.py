"""Interleaved measurement: contestants take turns, so a machine that drifts drifts for all of them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

Result = TypeVar("Result")
Batch = TypeVar("Batch")

_WARM_UP = 20  # steps


class TimedBatches(list[Batch]):
    """A loader that costs nothing and notes when each batch is asked for, which is once per step."""

    batch_size = 8

    def __iter__(self) -> Iterator[Batch]:
        clock = time.perf_counter
        stamps = self._stamps = list[float]()
        for batch in super().__iter__():
            stamps.append(clock())
            yield batch
        stamps.append(clock())

    def steps(self) -> list[float]:
        """Microseconds of each step of the last pass, without the first ones."""
        stamps = self._stamps[min(_WARM_UP, len(self) // 4) :]
        return [1e6 * (end - start) for start, end in itertools.pairwise(stamps)]


QUANTILES = (0.02, 0.05, 0.1)
"""Low ones, for steps: interruptions and a lower clock rate only add time, and more than what is to be measured."""


def low(steps: list[list[float]], quantile: float = 0.05) -> float:
    """Return a low quantile of the steps of all rounds: what a step takes when the machine does nothing else."""
    pooled = sorted(itertools.chain.from_iterable(steps))
    return pooled[int(len(pooled) * quantile)]


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that `run` takes, with the garbage collector off.

    Args:
        run: What is timed.
        clock: The clock. `time.process_time` leaves out the time in which other programs had the processor; only for
            work of one thread that waits for nothing.
    """
    gc.collect()
    gc.disable()
    try:
        start = clock()
        run()
        return clock() - start
    finally:
        gc.enable()


def interleaved(contestants: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Let every contestant run once per round, after one round that does not count.

    Args:
        contestants: Functions that return what they measured, by name.
        rounds: Rounds that count.

    Returns:
        The measurements by name, one per round.
    """
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for counted in (False, *([True] * rounds)):
        for name, contestant in contestants.items():
            value = contestant()
            if counted:
                results[name].append(value)
    return results


def median_difference(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of the difference within a round."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))


def spread(values: list[float], digits: int = 1) -> str:
    """Return `min-max`, for reading beside a median."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def keep_memory() -> None:
    """Let the allocator of glibc keep what is freed; elsewhere nothing changes.

    Otherwise it returns large blocks to the system or not depending on what was freed before, and a tensor of some
    megabytes takes 2 to 8 times as long to make when its pages are new.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(option, 1 << 30)


def machine() -> str:
    """Return the versions and hardware that figures are measured on."""
    cuda = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {_processor()}{cuda}, 1 thread"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
