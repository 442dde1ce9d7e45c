"""Groups of runs, and their results."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from composer.report._html import number
from composer.report._model import Run, Series

_LESS = re.compile(r"loss|error|entropy|perplexity|mse|mae\b|nll|fid\b|wer\b", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """Runs that are shown together: the seeds of a recipe, or a single run."""

    name: str
    runs: tuple[Run, ...]

    def metric_names(self) -> Iterable[str]:
        """Return the metrics of all its runs."""
        return dict.fromkeys(name for run in self.runs for name in run.metrics)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs, in the order of the first run of each group.

    A run without a group is a group by itself. Groups with the same name get the name of their folder too.
    """
    groups: dict[tuple[str, object], list[Run]] = {}
    for run in runs:
        key = ("group", run.group) if run.group is not None else ("run", id(run))
        groups.setdefault(key, []).append(run)
    names = [members[0].group or members[0].name for members in groups.values()]
    return [
        Group(name if names.count(name) == 1 else f"{name} ({members[0].folder.name})", tuple(members))
        for name, members in zip(names, groups.values(), strict=True)
    ]


def less_is_better(name: str) -> bool:
    """Return True if lower values of a metric of this name are better."""
    return bool(_LESS.search(name))


@dataclass(frozen=True)
class Result:
    """The result of a group in one metric.

    Attributes:
        mean: Mean of the last values of its runs.
        spread: Their sample standard deviation; None for a single run.
        count: Number of runs.
        best: The best value of any run.
        best_step: The step of the best value.
    """

    mean: float
    spread: float | None
    count: int
    best: float
    best_step: int


def results(group: Group, name: str) -> Result | None:
    """Return the result of a group in a metric; None if no run has it."""
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
    """Return the best finite value and its step; NaN if there is none."""
    best = (math.nan, 0)
    for each in series:
        known = np.flatnonzero(np.isfinite(each.values))
        if len(known):
            values = each.values[known]
            index = known[np.argmin(values) if less else np.argmax(values)]
            value = float(each.values[index])
            if math.isnan(best[0]) or (value < best[0] if less else value > best[0]):
                best = value, int(each.steps[index])
    return best


def show_group(result: Result | None, digits: int = 4) -> str:
    """Return a result as text: the mean, and the spread if there is one, with the same decimals."""
    if result is None:
        return ""
    if result.spread is None or math.isnan(result.spread):
        return number(result.mean, digits)
    decimals = digits - 1 - (math.floor(math.log10(abs(result.mean))) if result.mean else 0)
    decimals = min(max(decimals, 0), 6)
    return f"{result.mean:.{decimals}f} \u00b1 {result.spread:.{decimals}f}"
