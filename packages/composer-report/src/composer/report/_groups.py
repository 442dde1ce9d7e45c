"""Which runs are shown as one, and what they reached."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from composer.report._model import Run, Series

__all__ = ["Group", "Result", "group_runs", "less_is_better", "results", "show_group"]

_LESS = re.compile(r"loss|error|entropy|perplexity|mse|mae\b|nll|fid\b|wer\b", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """Runs that are shown as one: the seeds of a recipe, or a single run.

    Attributes:
        name: What it is called.
        runs: Its runs.
    """

    name: str
    runs: tuple[Run, ...]

    def metric_names(self) -> Iterable[str]:
        """The metrics of any of its runs."""
        return dict.fromkeys(name for run in self.runs for name in run.metrics)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put the runs of one group together, in the order of the first of each.

    Args:
        runs: The runs. Those without a group stand alone; those with the same name are told apart by folder.
    """
    found: dict[tuple[str, object], list[Run]] = {}
    for run in runs:
        key = ("group", run.group) if run.group is not None else ("run", id(run))
        found.setdefault(key, []).append(run)
    names = [members[0].group or members[0].name for members in found.values()]
    return [
        Group(name if names.count(name) == 1 else f"{name} ({members[0].folder.name})", tuple(members))
        for name, members in zip(names, found.values(), strict=True)
    ]


def less_is_better(name: str) -> bool:
    """Whether a metric of this name is the better the less it is."""
    return bool(_LESS.search(name))


@dataclass(frozen=True)
class Result:
    """What a group reached in one metric.

    Attributes:
        mean: Over its runs, of the last value.
        spread: The sample standard deviation; None with a single run.
        count: Runs.
        best: The best value that any of the runs had.
        best_step: When.
    """

    mean: float
    spread: float | None
    count: int
    best: float
    best_step: int


def results(group: Group, name: str) -> Result | None:
    """What a group reached in a metric; None if none of its runs has it."""
    series = [run.metrics[name] for run in group.runs if name in run.metrics]
    if not series:
        return None
    last = [each.last for each in series]
    best, step = _best(series, less_is_better(name))
    finite = all(math.isfinite(value) for value in last)
    mean = statistics.fmean(last) if finite else math.nan
    spread = None if len(last) < 2 else statistics.stdev(last) if finite else math.nan
    return Result(mean, spread, len(last), best, step)


def _best(series: Sequence[Series], less: bool) -> tuple[float, int]:
    """The best finite value and its step; NaN if there is none."""
    found = (math.nan, 0)
    for each in series:
        known = np.flatnonzero(np.isfinite(each.values))
        if len(known):
            values = each.values[known]
            index = known[np.argmin(values) if less else np.argmax(values)]
            value = float(each.values[index])
            if math.isnan(found[0]) or (value < found[0] if less else value > found[0]):
                found = value, int(each.steps[index])
    return found


def show_group(result: Result | None, digits: int = 4) -> str:
    """A result as text: the mean, and the spread if there is one, to the same decimals."""
    from composer.report._html import number

    if result is None:
        return ""
    if result.spread is None or math.isnan(result.spread):
        return number(result.mean, digits)
    decimals = digits - 1 - (math.floor(math.log10(abs(result.mean))) if result.mean else 0)
    decimals = min(max(decimals, 0), 6)
    return f"{result.mean:.{decimals}f} \u00b1 {result.spread:.{decimals}f}"
