"""Results of recipes: their comparison, and its table and JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import composer
from composer.recipes._recipe import Dataset, Metric, Recipe


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        seed: The seed.
        scores: The values of each metric at all evaluations, by its key.
        tested_at: Seconds of training before each evaluation, without evaluations.
        train_seconds: Wall-clock time of the training, without evaluations.
        seconds: Wall-clock time of the whole run.
        samples: Number of training samples processed.
        actions: A sentence about what each algorithm did, by its class name.
    """

    seed: int
    scores: dict[str, list[float]]
    tested_at: list[float]
    train_seconds: float
    seconds: float
    samples: int
    actions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The runs of a recipe.

    Attributes:
        recipe: The recipe.
        runs: One run per seed.
        plan: `engine.explain()`, restricted to algorithms.
        device: The name of the training device.
        threads: Number of CPU threads.
        num_parameters: Number of parameters of the network.
    """

    recipe: Recipe
    runs: list[Run]
    plan: str
    device: str
    threads: int
    num_parameters: int

    @property
    def metric(self) -> Metric:
        """The metric by which the recipe is compared."""
        return self.recipe.metrics[0]

    def finals(self, metric: Metric | None = None) -> list[float]:
        """Return the final value of each run.

        Args:
            metric: The metric. None: the first one of the recipe.
        """
        key = (metric or self.metric).key
        return [run.scores[key][-1] for run in self.runs]

    def mean(self, metric: Metric | None = None) -> float:
        """Return the mean of the final values; `metric` as in `finals`."""
        return statistics.fmean(self.finals(metric))

    def spread(self, metric: Metric | None = None) -> float:
        """Return the sample standard deviation of the final values, 0 for a single run; `metric` as in `finals`."""
        return _spread(self.finals(metric))

    @property
    def train_seconds(self) -> float:
        """The mean training time of a run."""
        return statistics.fmean(run.train_seconds for run in self.runs)

    @property
    def samples_per_second(self) -> float:
        """Training samples per second of training time, over all runs."""
        return sum(run.samples for run in self.runs) / sum(run.train_seconds for run in self.runs)


@dataclass(frozen=True)
class TimeToQuality:
    """The training time after which a recipe stays as good as a base recipe is at its end.

    Attributes:
        goal: The mean of the final values of the base recipe.
        ratios: For each seed, the training time until the first evaluation from which on all reach the goal, divided
            by the total training time of the base recipe with the same seed. None for a run that ended worse.
    """

    goal: float
    ratios: list[float | None]

    @property
    def reached(self) -> list[float]:
        """The ratios of the runs that reached the goal at their end."""
        return [ratio for ratio in self.ratios if ratio is not None]

    @property
    def mean(self) -> float | None:
        """The mean of the ratios; None if a run ended worse."""
        return statistics.fmean(self.reached) if len(self.reached) == len(self.ratios) else None

    @property
    def spread(self) -> float:
        """The sample standard deviation of the ratios; 0 with a single one."""
        return _spread(self.reached)


def time_to_quality(base: Result, other: Result) -> TimeToQuality:
    """Return the training time after which `other` stays as good as `base` is at its end.

    A good evaluation that is followed by worse ones does not count.

    Args:
        base: The result to compare with.
        other: The other result; its runs must have the same seeds.

    Raises:
        ValueError: The seeds differ.
    """
    seeds = [[run.seed for run in result.runs] for result in (base, other)]
    if seeds[0] != seeds[1]:
        raise ValueError(f"Results must have runs of the same seeds to be compared, got {seeds[0]} and {seeds[1]}.")
    goal, metric = base.mean(), base.metric
    ratios: list[float | None] = []
    for slow, fast in zip(base.runs, other.runs, strict=True):
        seconds = _reached_for_good(fast, metric, goal)
        ratios.append(None if seconds is None else seconds / slow.train_seconds)
    return TimeToQuality(goal, ratios)


def noise_of_time_to_quality(base: Result) -> TimeToQuality | None:
    """Return `time_to_quality` of runs that differ only in the seed: each run of `base` against the others.

    The goal of each run is the mean of the other runs' final values, and its ratio refers to its own training time.

    Args:
        base: The result.

    Returns:
        The ratios, and the mean of all final values as goal; None for a single run.
    """
    if len(base.runs) < 2:
        return None
    finals, ratios = base.finals(), []
    for index, run in enumerate(base.runs):
        goal = statistics.fmean(finals[:index] + finals[index + 1 :])
        seconds = _reached_for_good(run, base.metric, goal)
        ratios.append(None if seconds is None else seconds / run.train_seconds)
    return TimeToQuality(base.mean(), ratios)


def _reached_for_good(run: Run, metric: Metric, goal: float) -> float | None:
    """Return the seconds of training from which on all evaluations reach `goal`; None if the last one does not."""
    seconds = None
    for at, value in zip(reversed(run.tested_at), reversed(run.scores[metric.key]), strict=True):
        if not metric.reaches(value, goal):
            break
        seconds = at
    return seconds


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


# ---- the report ----


def print_report(results: Sequence[Result], console: Console) -> None:
    """Print a table of the results, and what each algorithm did.

    Args:
        results: The results; all are compared with the first.
        console: The console.
    """
    console.print(_table(results))
    for result in results[1:]:
        console.print(_verdict(results[0], result), highlight=False)
    for result in results:
        if result.recipe.algorithms:
            first = result.runs[0]
            console.print(f"\nWhen the algorithms of `{result.recipe.name}` act (engine.explain()):\n", highlight=False)
            console.print(result.plan, highlight=False, soft_wrap=True)
            console.print(f"\nWhat each of them did in the run from seed {first.seed}:\n", highlight=False)
            width = max(map(len, first.actions))
            for name, action in first.actions.items():
                console.print(f"  {name:<{width}}  {action}", highlight=False, soft_wrap=True)


def _table(results: Sequence[Result]) -> Table:
    seeds = [run.seed for run in results[0].runs]
    several = len(seeds) > 1
    spread = "mean and standard deviation" if several else "one run"
    table = Table(
        title=f"At the end, {spread} over {len(seeds)} seed{'s' if several else ''}",
        caption="Seconds and samples/s do not include evaluations.",
    )
    table.add_column("recipe")
    metrics = results[0].recipe.metrics
    for heading in (*(f"test {metric.title}" for metric in metrics), "seconds per run", "samples/s"):
        table.add_column(heading, justify="right")
    for result in results:
        values = [metric.show(result.mean(metric), result.spread(metric) if several else None) for metric in metrics]
        table.add_row(result.recipe.name, *values, f"{result.train_seconds:.1f}", f"{result.samples_per_second:,.0f}")
    return table


def _verdict(base: Result, other: Result) -> str:
    """Return sentences that compare two results: final metrics, training times, and time to the same quality."""
    metric, name, ratio = base.metric, other.recipe.name, other.train_seconds / base.train_seconds
    values = f"test {metric.title} {metric.show(base.mean())} -> {metric.show(other.mean())}"
    lines = [f"{base.recipe.name} -> {name}: {values}, in {ratio:.2f} times the training time."]
    worse = [
        f"{each.title} ({each.show(base.mean(each))} -> {each.show(other.mean(each))})"
        for each in base.recipe.metrics[1:]
        if not each.reaches(other.mean(each), base.mean(each))
    ]
    if worse:
        lines.append(f"{name} is worse in test {', '.join(worse)}.")
    time, noise = time_to_quality(base, other), noise_of_time_to_quality(base)
    goal = f"the {metric.show(time.goal)} that {base.recipe.name} has at its end"
    if time.mean is None:
        lines.append(f"{len(time.reached)} of {len(time.ratios)} runs of {name} reached and kept {goal}.")
    else:
        several = f" +- {time.spread:.2f}" if len(time.ratios) > 1 else ""
        lines.append(
            f"{name} reached and kept {goal}, after {time.mean:.2f}{several} of the time of {base.recipe.name}."
        )
    if noise is not None:  # how much is chance
        times = ", ".join("not at all" if each is None else f"{each:.2f}" for each in noise.ratios)
        others = f"each run of {base.recipe.name} against the mean of its other seeds"
        lines.append(f"For comparison, {others}: after {times} of its time.")
    return "\n".join(lines)


def as_json(results: Sequence[Result], dataset: Dataset) -> dict[str, Any]:
    """Return all results as values that JSON can represent.

    Args:
        results: The results; all are compared with the first.
        dataset: The data.
    """
    noise = noise_of_time_to_quality(results[0])
    return {
        "data": dataset.describe(),
        "machine": _machine(results[0]),
        "recipes": [_result_as_json(result) for result in results],
        "time_to_quality_of_other_seeds": None if noise is None else noise.ratios,
        "time_to_quality": {
            result.recipe.name: {"goal": time.goal, "mean": time.mean, "spread": time.spread, "ratios": time.ratios}
            for result, time in ((result, time_to_quality(results[0], result)) for result in results[1:])
        },
    }


def _result_as_json(result: Result) -> dict[str, Any]:
    recipe = result.recipe
    parts: list[Any] = [recipe.data, recipe.network, recipe.training]
    values = {key: value for part in parts for key, value in asdict(part).items()}
    return {
        "name": recipe.name,
        "algorithms": [_as_text(algorithm) for algorithm in recipe.algorithms],
        "hyperparameters": {key: str(value) if isinstance(value, Path) else value for key, value in values.items()},
        "num_parameters": result.num_parameters,
        "summary": {
            **{metric.key: {"mean": result.mean(metric), "spread": result.spread(metric)} for metric in recipe.metrics},
            "train_seconds": result.train_seconds,
            "samples_per_second": result.samples_per_second,
        },
        "runs": [asdict(run) for run in result.runs],
        "plan": result.plan.splitlines(),
    }


def _as_text(algorithm: Any) -> str:
    """Return the `repr` of an algorithm, or its class name if the `repr` is only an address."""
    text = repr(algorithm)
    return type(algorithm).__name__ if " object at 0x" in text else text


def _machine(result: Result) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if result.device == "gpu" else result.device,
        "cores": os.cpu_count(),
        "threads": result.threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "composer": composer.__version__,
    }
