"""What came out of training recipes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer.recipes._hparams import Recipe
from composer.recipes._parts import Metric

__all__ = ["Result", "Run", "TimeToQuality", "noise_of_time_to_quality", "time_to_quality"]


@dataclass(frozen=True)
class Run:
    """One training from one seed.

    Attributes:
        seed: The seed.
        scores: By the key of each metric: what every evaluation gave, in order.
        tested_at: Seconds of training before each evaluation; evaluations are left out of them.
        train_seconds: Wall-clock time of the training, evaluations left out.
        seconds: Wall-clock time of all of it.
        samples: How many times a sample was trained on.
        deeds: What each algorithm did, by its class name, in a sentence.
    """

    seed: int
    scores: dict[str, list[float]]
    tested_at: list[float]
    train_seconds: float
    seconds: float
    samples: int
    deeds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What training a recipe gave.

    Attributes:
        recipe: The recipe.
        runs: One per seed.
        plan: `engine.explain()`, of algorithms.
        device: What it ran on.
        threads: Threads of the CPU it ran on.
        num_parameters: Of the network.
    """

    recipe: Recipe
    runs: list[Run]
    plan: str
    device: str
    threads: int
    num_parameters: int

    @property
    def metric(self) -> Metric:
        """What the recipe is compared by."""
        return self.recipe.metrics[0]

    def finals(self, metric: Metric | None = None) -> list[float]:
        """The value at the end of each run.

        Args:
            metric: Of which metric. None: of what the recipe is compared by.
        """
        key = (metric or self.metric).key
        return [run.scores[key][-1] for run in self.runs]

    def mean(self, metric: Metric | None = None) -> float:
        """The mean of the values at the end.

        Args:
            metric: Of which metric. None: of what the recipe is compared by.
        """
        return statistics.fmean(self.finals(metric))

    def spread(self, metric: Metric | None = None) -> float:
        """The sample standard deviation of the values at the end; 0 with a single run.

        Args:
            metric: Of which metric. None: of what the recipe is compared by.
        """
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
    """How soon one recipe was as good as another one at its end, and stayed so.

    Attributes:
        goal: The mean of what the other one had at the end of its runs.
        ratios: For each seed the training time until the first evaluation that was as good, with all later ones,
            divided by all the training time of the other recipe from the same seed; None for a run that ended worse.
    """

    goal: float
    ratios: list[float | None]

    @property
    def reached(self) -> list[float]:
        """The ratios of the runs that were as good at their end."""
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
    """Return how soon `other` was as good as `base` was at its end, and stayed so to its own end.

    A single good evaluation that later ones fall behind does not count.

    Args:
        base: What is compared with.
        other: What is compared; its runs have the same seeds.

    Raises:
        ValueError: They do not.
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
    """Return what `time_to_quality` shows where nothing differs but the seed: `base` against itself.

    The goal of each run is the mean of the other runs' ends, and its ratio is of its own training time.

    Args:
        base: What is compared with.

    Returns:
        The ratios, with the mean of the goals; None with a single run.
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
    """Return the seconds of training after which every evaluation was as good as `goal`; None if the last was not."""
    found = None
    for at, value in zip(reversed(run.tested_at), reversed(run.scores[metric.key]), strict=True):
        if not metric.reaches(value, goal):
            break
        found = at
    return found


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
