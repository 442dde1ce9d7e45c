"""Results of training recipes, and their comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer.recipes._hparams import Recipe
from composer.recipes._parts import Metric


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
