"""Comparisons of scores: intervals, corrected p-values, the smallest visible effect, ladders, verdicts.

Effects are signed so that more is better: for a loss, the control minus the method.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from scipy import special, stats

T = TypeVar("T")

ALPHA = 0.05
"""Probability of at least one false verdict in a family of comparisons."""
POWER = 0.8
"""Probability with which an effect of the smallest visible size is found."""

_POINTS = 50  # between two rungs of a ladder, where its crossing is looked for


@dataclass(frozen=True)
class Comparison:
    """Difference between a method and the control.

    Attributes:
        effect: Mean difference; positive is better.
        low: Lower end of its 95 % interval, for this comparison alone.
        high: Upper end.
        p: Two-sided p-value, for this comparison alone.
        freedom: The degrees of freedom.
        sd: Standard deviation of the method.
        sd_control: Standard deviation of the control.
        n: Number of runs of the method.
        n_control: Number of runs of the control.
        test: "welch" for independent runs, "paired" for scores of the same runs.
        correlation: Correlation of pairs of equal seeds; NaN without pairs.
        p_corrected: The p-value with Holm's correction for the family; NaN before it is corrected.
        family: The number of comparisons in the family.
    """

    effect: float
    low: float
    high: float
    p: float
    freedom: float
    sd: float
    sd_control: float
    n: int
    n_control: int
    test: Literal["welch", "paired"]
    correlation: float
    p_corrected: float = math.nan
    family: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return what does not depend on the rest of the family, with None in place of NaN."""
        values = {key: value for key, value in vars(self).items() if key not in ("p_corrected", "family")}
        return {key: None if value != value else value for key, value in values.items()}

    @property
    def smallest_visible(self) -> float:
        """The smallest effect that is found with `POWER`, where the correction for the family is strictest."""
        t = special.stdtrit(self.freedom, np.array([1 - ALPHA / 2, 1 - ALPHA / self.family / 2, POWER]))
        return float((self.high - self.low) / 2 / t[0] * (t[1] + t[2]))


@dataclass(frozen=True)
class Verdict:
    """Judgement of a method.

    Attributes:
        word: "gain", "loss", "no effect found", "not applicable" or "not judged".
        why: The reason, or the smallest visible effect.
    """

    word: Literal["gain", "loss", "no effect found", "not applicable", "not judged"]
    why: str = ""


def compare(
    control: Mapping[int, float],
    methods: Mapping[str, Mapping[int, float]],
    *,
    higher_is_better: bool,
    same_runs: frozenset[str] = frozenset(),
) -> dict[str, Comparison]:
    """Compare methods with one control, as one family.

    Runs of different methods are independent samples, compared by Welch's test with all runs of the control: pairs of
    equal seeds correlate too little to be worth the degrees of freedom. Scores of the same runs (averages of the
    weights) are compared by the paired test. Holm's correction holds for any dependence between the methods.

    Args:
        control: Seed -> score of plain training.
        methods: Name -> seed -> score.
        higher_is_better: True for accuracies, False for losses.
        same_runs: Names of the methods whose scores are of the runs of the control.

    Returns:
        Name -> comparison.

    Raises:
        ValueError: A sample has fewer than two scores, or a score is not finite.

    Example:
        >>> plain = {seed: 0.5 + 0.01 * (seed % 3) for seed in range(20)}
        >>> better = {seed: 0.6 + 0.01 * (seed % 2) for seed in range(10)}
        >>> result = compare(plain, {"better": better}, higher_is_better=True)["better"]
        >>> round(result.effect, 2), result.p_corrected < 0.05
        (0.1, True)

    Source: Welch, "The generalization of 'Student's' problem when several different population variances are
        involved", 1947. Holm, "A simple sequentially rejective multiple test procedure", 1979.
    Differs: none.
    """
    return correct(
        {
            name: compare_one(control, scores, higher_is_better=higher_is_better, paired=name in same_runs)
            for name, scores in methods.items()
        }
    )


def compare_one(
    control: Mapping[int, float], method: Mapping[int, float], *, higher_is_better: bool, paired: bool
) -> Comparison:
    """Return one comparison, not corrected; see `compare`.

    Raises:
        ValueError: A sample has fewer than two scores, or a score is not finite.
    """
    for name, scores in {"the control": control, "the method": method}.items():
        if len(scores) < 2 or not all(map(math.isfinite, scores.values())):
            raise ValueError(f"Two or more finite scores are needed, got {list(scores.values())} of {name}.")
    sign = 1.0 if higher_is_better else -1.0
    seeds = sorted(set(control) & set(method))
    if paired and len(seeds) < 2:
        raise ValueError(f"Scores of the same runs must have two or more common seeds, got {len(seeds)}.")
    a, b = (sign * np.array([scores[seed] for seed in seeds]) for scores in (method, control))
    varies = len(seeds) > 2 and np.ptp(a) > 0 and np.ptp(b) > 0
    correlation = float(np.corrcoef(a, b)[0, 1]) if varies else math.nan
    if not paired:
        a, b = (sign * np.array(list(scores.values())) for scores in (method, control))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # constant scores have no variance
        test = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
        interval = test.confidence_interval(1 - ALPHA)
    effect = float(a.mean() - b.mean())
    if math.isfinite(test.statistic):
        low, high, p, freedom = map(float, (interval.low, interval.high, test.pvalue, test.df))
    else:  # constant scores: equal, or different without doubt
        low, high, p, freedom = effect, effect, 1.0 if effect == 0 else 0.0, 1.0
    return Comparison(
        effect=effect,
        low=low,
        high=high,
        p=p,
        freedom=freedom,
        sd=float(np.std(list(method.values()), ddof=1)),
        sd_control=float(np.std(list(control.values()), ddof=1)),
        n=len(method),
        n_control=len(control),
        test="paired" if paired else "welch",
        correlation=correlation,
    )


def correct(comparisons: Mapping[T, Comparison]) -> dict[T, Comparison]:
    """Return comparisons with Holm's correction, as one family."""
    corrected = holm({key: each.p for key, each in comparisons.items()})
    count = len(comparisons)
    return {key: replace(each, p_corrected=corrected[key], family=count) for key, each in comparisons.items()}


def holm(p_values: Mapping[T, float]) -> dict[T, float]:
    """Return p-values with Holm's correction.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.5})
        {'a': 0.03, 'b': 0.08, 'c': 0.5}
    """
    names = sorted(p_values, key=lambda name: p_values[name])
    factors = np.arange(len(names), 0, -1)
    values = np.maximum.accumulate(factors * np.array([p_values[name] for name in names]))
    corrected = dict(zip(names, np.minimum(values, 1.0).tolist(), strict=True))
    return {name: corrected[name] for name in p_values}


def judge(screening: Comparison, confirmation: Comparison | None = None) -> Verdict:
    """Return the verdict about a method.

    Args:
        screening: The first comparison.
        confirmation: The comparison on fresh seeds of method and control; a gain needs one.

    Returns:
        "gain" if both comparisons find one; "loss" if the first finds one; otherwise "no effect found", with the
        smallest visible effect, or "not judged" while the confirmation is missing.
    """
    if screening.p_corrected >= ALPHA:
        return Verdict("no effect found", f"smallest visible: {screening.smallest_visible:.4g}")
    if screening.effect < 0:
        return Verdict("loss")
    if confirmation is None:
        return Verdict("not judged", "a gain on the first seeds, to be confirmed on fresh ones")
    if confirmation.effect > 0 and confirmation.p_corrected < ALPHA:
        return Verdict("gain")
    visible = f"smallest visible: {confirmation.smallest_visible:.4g}"
    return Verdict("no effect found", f"{visible}; a first gain was not confirmed on fresh seeds")


@dataclass(frozen=True)
class Rung:
    """Complete runs of one length.

    Attributes:
        time: Time of a run, in units of plain's full budget.
        scores: Seed -> score.
    """

    time: float
    scores: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean score."""
        return float(np.mean(list(self.scores.values())))


@dataclass(frozen=True)
class Crossing:
    """Time or steps at which a ladder reaches a target, as a fraction of plain's full budget.

    Attributes:
        ratio: The time; None if no rung reaches the target.
        low: Lower end of its 95 % interval; None if even the upper end of the ladder's interval stays below the target.
        high: Upper end; None if the lower end of the ladder's interval stays below the target.
        at_most: True if the shortest rung is already there, so that `ratio` is only an upper bound.
    """

    ratio: float | None
    low: float | None
    high: float | None
    at_most: bool = False

    def scaled(self, ratio: float, low: float, high: float) -> Crossing:
        """Return a crossing in steps as one in time.

        Args:
            ratio: The ratio of step times.
            low: The lower end of its interval, which widens that of the crossing.
            high: The upper end.
        """

        def times(steps: float | None, factor: float) -> float | None:
            return None if steps is None else steps * factor

        return Crossing(times(self.ratio, ratio), times(self.low, low), times(self.high, high), self.at_most)


def at_equal_time(
    method: Mapping[int, float], time: float, ladder: Sequence[Rung], *, higher_is_better: bool
) -> tuple[float, float, float, bool]:
    """Compare a method with plain training that gets the same time.

    Args:
        method: Seed -> score of the method.
        time: The time of its runs, in units of plain's full budget.
        ladder: Rungs of plain, each with complete runs tuned for their length; means in between are interpolated in
            the logarithm of time.
        higher_is_better: True for accuracies, False for losses.

    Returns:
        The effect, both ends of its 95 % interval, and True if plain has no rung as long as `time`: then the effect is
        only an upper bound.
    """
    rungs = sorted(ladder, key=lambda rung: rung.time)
    effect, half = map(float, _contrast([(1.0, method), *((-weight, scores) for weight, scores in _at(rungs, time))]))
    sign = 1.0 if higher_is_better else -1.0
    return sign * effect, sign * effect - half, sign * effect + half, time > rungs[-1].time * (1 + 1e-9)


def time_to_target(ladder: Sequence[Rung], plain: Mapping[int, float], *, higher_is_better: bool) -> Crossing:
    """Return the time at which a ladder of complete runs reaches the mean of plain at its full budget.

    The ladder is the means of its rungs, interpolated in the logarithm of time; it counts from where it stays above
    the target. The ends of the interval are where the ends of the ladder's own interval do so: it holds the times at
    which the difference from the target is not significant.

    Args:
        ladder: Rungs of a method, or of plain with other seeds.
        plain: Seed -> score of plain at its full budget.
        higher_is_better: True for accuracies, False for losses.

    Example:
        >>> rungs = [Rung(0.5, {0: 0.8, 1: 0.8}), Rung(1.0, {0: 1.0, 1: 1.0})]
        >>> round(time_to_target(rungs, {0: 0.9, 1: 0.9}, higher_is_better=True).ratio, 3)
        0.707

    Source: Fieller, "Some problems in interval estimation", 1954, with Welch's degrees of freedom.
    Differs: none.
    """
    sign = 1.0 if higher_is_better else -1.0
    rungs = sorted(ladder, key=lambda rung: rung.time)
    part = np.linspace(0.0, 1.0, _POINTS)
    logs, curves = [], []
    for before, after in itertools.pairwise(rungs):
        logs.append((1 - part) * math.log(before.time) + part * math.log(after.time))
        curves.append(_contrast([(-1.0, plain), (1 - part, before.scores), (part, after.scores)]))
    middle, half = np.concatenate(curves, axis=1)
    times = np.exp(np.concatenate(logs))
    ratio, low, high = (_cross(times, curve) for curve in (sign * middle, sign * middle + half, sign * middle - half))
    return Crossing(ratio, low, high, at_most=ratio is not None and math.isclose(ratio, rungs[0].time))


def _at(rungs: Sequence[Rung], time: float) -> list[tuple[float, Mapping[int, float]]]:
    """Return weights and scores whose mean is that of a ladder at a time; beyond its ends it is that of the end."""
    later = next((i for i, rung in enumerate(rungs) if rung.time >= time * (1 - 1e-9)), None)
    if later is None or later == 0:
        return [(1.0, rungs[-1 if later is None else 0].scores)]
    before, after = rungs[later - 1], rungs[later]
    part = math.log(time / before.time) / math.log(after.time / before.time)
    return [(1 - part, before.scores), (part, after.scores)]


def _contrast(parts: Sequence[tuple[Any, Mapping[int, float]]]) -> np.ndarray:
    """Return a weighted sum of means of independent samples, and half of its 95 % interval by Welch's approximation.

    Args:
        parts: A weight, or an array of weights for as many sums, and the scores of each sample.
    """
    mean, variance, spread = 0.0, 0.0, 0.0
    for weight, scores in parts:
        values = np.array(list(scores.values()))
        own = weight**2 * (values.var(ddof=1) / len(values) if len(values) > 1 else 0.0)
        mean, variance = mean + weight * values.mean(), variance + own
        spread = spread + own**2 / max(1, len(values) - 1)
    freedom = np.where(spread > 0, variance**2 / np.where(spread > 0, spread, 1.0), 1.0)
    half = special.stdtrit(freedom, 1 - ALPHA / 2) * np.sqrt(variance)
    return np.stack([mean + 0 * half, half])


def _cross(times: np.ndarray, above: np.ndarray) -> float | None:
    """Return the time from which on a curve stays at or above 0; None for never."""
    below = np.flatnonzero(above < 0)
    if not len(below):
        return float(times[0])
    last = below[-1]
    if last == len(above) - 1:
        return None
    part = -above[last] / (above[last + 1] - above[last])
    return float(times[last] * (times[last + 1] / times[last]) ** part)
