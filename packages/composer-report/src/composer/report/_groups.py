"""Groups of runs with their results, and families of metrics that share a chart."""

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


# ---- metrics ----

_COUNTERS = re.compile(r"time/(epoch|batch|sample|token|iteration)(_in_(epoch|iteration))?|trainer/.*microbatch_size")
_MACHINE = re.compile(r"(memory|cpu_|disk_|network_|(min_|max_)?(gpu|memory_percentage))")
_TITLES = {
    "samples_per_sec": "Samples per second",
    "batches_per_sec": "Batches per second",
    "tokens_per_sec": "Tokens per second",
    "flops_per_sec": "Operations per second",
    "mfu": "Model FLOPs utilization",
    "total": "Loss",
}


@dataclass(frozen=True)
class Family:
    """Metrics that share a chart.

    Attributes:
        section: "learning", "rate", "speed", "machine" or "other".
        title: The title of the chart.
        key: The subtitle of the chart.
        members: The label in the chart of each metric.
    """

    section: str
    title: str
    key: str
    members: dict[str, str]


def families(names: Iterable[str]) -> list[Family]:
    """Assign metrics to sections and charts. Counters such as `time/batch` are left out: they are x axes."""
    charts: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in sorted(names):
        if not _COUNTERS.fullmatch(name):
            section, title, key, member = _place(name)
            charts.setdefault((section, title, key), {})[name] = member
    ordered = sorted(charts.items(), key=_rank)
    return [Family(section, title, key, members) for (section, title, key), members in ordered]


def _rank(item: tuple[tuple[str, str, str], dict[str, str]]) -> tuple[int, bool, bool, str]:
    (section, title, key), _ = item
    order = ("learning", "rate", "speed", "machine", "other").index(section)
    return order, not key.startswith("loss"), title != "Loss", title


def _place(name: str) -> tuple[str, str, str, str]:
    """Return section, title and subtitle of the chart of a metric, and its label there."""
    parts = name.split("/")
    if parts[0] in ("loss", "metrics") and len(parts) > 2:
        rest = "/".join(parts[2:])
        title = "Loss" if (parts[0], rest) == ("loss", "total") else _spaced(rest)
        return "learning", title, f"{parts[0]}/*/{rest}", parts[1]
    if name.startswith("lr-"):
        return "rate", "Learning rate", "lr-*", name.removeprefix("lr-")
    if parts[0] == "throughput":
        title = _TITLES.get(parts[-1], _spaced(parts[-1]))
        return "speed", title, f"throughput/*/{parts[-1]}", "per device" if "device" in parts else "all devices"
    if parts[0] == "time":
        return "speed", "Remaining time" if "remaining" in name else "Time spent", "time/*", "/".join(parts[1:])
    if _MACHINE.match(name):
        kind = re.match(r"(memory/[a-z]+|[a-z]+_[a-z]+|[a-z]+)", name)
        stem = kind[0] if kind else name
        return "machine", _spaced(stem.replace("/", " ")).capitalize(), f"{stem}*", name.removeprefix("memory/")
    head, _, last = name.rpartition("/")
    return "other", head or last, f"{head}/*" if head else "", last or name


def _spaced(name: str) -> str:
    """Return `MulticlassAccuracy` as "Multiclass accuracy"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").split(" ")
    return " ".join(
        [words[0][:1].upper() + words[0][1:], *(word if word.isupper() else word.lower() for word in words[1:])]
    )
