"""How fast a run trained: what to show of it, and, without a `SpeedMonitor`, from the clock of its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from composer.report._model import Run, Series
from composer.report._select import Family

__all__ = ["RATE", "rate_family", "with_rates", "without_repetition"]

RATE = "recorded batches per second"
_PARTS = 60  # of the run, for each of which there is a rate


def with_rates(run: Run) -> Run:
    """The run with its rate as a metric, if it is known and nothing else tells."""
    clock = run.metrics.get("time/batch") or run.metrics.get("loss/train/total")
    told = any(name.startswith("throughput/") for name in run.metrics)
    if told or run.source != "recorder" or clock is None or len(clock.steps) < 4:
        return run
    rate = _rate(run, clock)
    return run if rate is None else replace(run, metrics={**run.metrics, RATE: rate})


def without_repetition(run: Run) -> Run:
    """The run without what a `SpeedMonitor` says per device, if there is but one."""
    repeated = set()
    for name, series in run.metrics.items():
        whole = run.metrics.get(name.replace("throughput/device/", "throughput/"))
        if whole is not None and whole is not series and np.array_equal(whole.values, series.values):
            repeated.add(name)
    return replace(run, metrics={name: series for name, series in run.metrics.items() if name not in repeated})


def _rate(run: Run, clock: Series) -> Series | None:
    seconds = clock.seconds.copy()
    for evaluation in run.evaluations:  # not training time
        seconds[clock.seconds >= evaluation.seconds - 1e-3] -= evaluation.duration
    index = np.unique(np.linspace(0, len(seconds) - 1, min(_PARTS, len(seconds) // 2) + 1).astype(int))
    steps, times = np.diff(clock.steps[index]), np.diff(seconds[index])
    good = (times > 0) & (steps > 0)
    if not good.any():
        return None
    ends = index[1:][good]
    values = steps[good] / times[good]
    return Series(RATE, clock.steps[ends], clock.seconds[ends], clock.epochs[ends], values)


def rate_family(runs: Sequence[Run]) -> list[Family]:
    """The chart of the rates; none if no run has one."""
    if not any(RATE in run.metrics for run in runs):
        return []
    return [Family("speed", "Batches per second", RATE, {RATE: "all devices"})]
