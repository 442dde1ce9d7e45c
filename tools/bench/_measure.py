"""Interleaved measurement: contestants take turns, so a machine that drifts drifts for all of them."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

__all__ = ["interleaved", "machine", "median_difference", "spread", "timed"]

Result = TypeVar("Result")


def timed(run: Callable[[], object]) -> float:
    """Seconds that `run` takes, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
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


def spread(values: list[float]) -> str:
    """`min-max`, for reading beside a median."""
    return f"{min(values):.1f}-{max(values):.1f}"


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
