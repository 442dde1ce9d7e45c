"""Comparisons of scores: intervals, corrected p-values, the smallest visible effect, ladders, verdicts.

Effects are signed so that more is better: for a loss, the control minus the method.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special, stats

ALPHA = 0.05
"""Probability of at least one false verdict among all methods that are compared with one control."""
POWER = 0.8
"""Probability with which an effect of the smallest visible size is found."""

_RESAMPLES = 4000


@dataclass(frozen=True)
class Comparison:
    """Difference between a method and the control.

    Attributes:
        effect: Mean difference; positive is better.
        low: Lower end of its 95 % interval, for this comparison alone.
        high: Upper end.
        p: Two-sided p-value, for this comparison alone.
        p_corrected: The p-value with Holm's correction for all methods of the family.
        smallest_visible: The smallest effect that is found with `POWER`, corrected for the family.
        sd: Standard deviation of the method.
        sd_control: Standard deviation of the control.
        n: Number of runs of the method.
        n_control: Number of runs of the control.
        test: "welch" for independent runs, "paired" for scores of the same runs.
        correlation: Correlation of pairs of equal seeds; NaN without pairs.
    """

    effect: float
    low: float
    high: float
    p: float
    p_corrected: float
    smallest_visible: float
    sd: float
    sd_control: float
    n: int
    n_control: int
    test: Literal["welch", "paired"]
    correlation: float


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
    for name, scores in {"the control": control, **methods}.items():
        if len(scores) < 2 or not all(map(math.isfinite, scores.values())):
            raise ValueError(
                f"`methods` must have two or more finite scores each, got {list(scores.values())} of {name}."
            )
    sign = 1.0 if higher_is_better else -1.0
    found = {}
    for name, scores in methods.items():
        found[name] = _compare_one(control, scores, sign, len(methods), paired=name in same_runs)
    corrected = holm({name: result.p for name, result in found.items()})
    return {name: replace(result, p_corrected=corrected[name]) for name, result in found.items()}


def _compare_one(
    control: Mapping[int, float], method: Mapping[int, float], sign: float, family: int, *, paired: bool
) -> Comparison:
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
        error = (high - low) / 2 / float(special.stdtrit(freedom, 1 - ALPHA / 2))
        visible = _visible(freedom, family) * error
    else:  # constant scores: equal, or different without doubt
        low, high, p, visible = effect, effect, 1.0 if effect == 0 else 0.0, 0.0
    return Comparison(
        effect=effect,
        low=low,
        high=high,
        p=p,
        p_corrected=p,
        smallest_visible=visible,
        sd=float(np.std(list(method.values()), ddof=1)),
        sd_control=float(np.std(list(control.values()), ddof=1)),
        n=len(method),
        n_control=len(control),
        test="paired" if paired else "welch",
        correlation=correlation,
    )


def _visible(freedom: float, family: int) -> float:
    """Return the smallest visible effect in standard errors, where the correction for the family is strictest."""
    return float(special.stdtrit(freedom, 1 - ALPHA / family / 2) + special.stdtrit(freedom, POWER))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
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

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 for one run."""
        values = list(self.scores.values())
        return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Crossing:
    """Time or steps at which a ladder reaches a target, as a fraction of plain's full budget.

    Attributes:
        ratio: The time; None if no rung reaches the target.
        low: Lower end of its 95 % interval; None if the resampled ladders mostly do not reach the target.
        high: Upper end; None if more than 2.5 % of the resampled ladders do not reach it.
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
        The effect, both ends of its 95 % interval (normal approximation), and True if plain has no rung as long as
        `time`: then the effect is only an upper bound.
    """
    sign = 1.0 if higher_is_better else -1.0
    rungs = sorted(ladder, key=lambda rung: rung.time)
    own = Rung(time, method)
    later = [i for i, rung in enumerate(rungs) if rung.time >= time * (1 - 1e-9)]
    if not later:
        mean, error, bound = rungs[-1].mean, rungs[-1].error, True
    elif later[0] == 0:
        mean, error, bound = rungs[0].mean, rungs[0].error, False
    else:
        before, after = rungs[later[0] - 1], rungs[later[0]]
        part = math.log(time / before.time) / math.log(after.time / before.time)
        mean = (1 - part) * before.mean + part * after.mean
        error, bound = math.hypot((1 - part) * before.error, part * after.error), False
    effect = sign * (own.mean - mean)
    half = float(special.ndtri(1 - ALPHA / 2)) * math.hypot(own.error, error)
    return effect, effect - half, effect + half, bound


def time_to_target(
    ladder: Sequence[Rung], plain: Mapping[int, float], *, higher_is_better: bool, seed: int = 0
) -> Crossing:
    """Return the time at which a ladder of complete runs reaches the mean of plain at its full budget.

    The ladder is the means of its rungs, interpolated in the logarithm of time; it counts from where it stays above
    the target. The interval resamples the runs of each rung and of plain.

    Args:
        ladder: Rungs of a method, or of plain with other seeds.
        plain: Seed -> score of plain at its full budget.
        higher_is_better: True for accuracies, False for losses.
        seed: Seed of the resampling.

    Example:
        >>> rungs = [Rung(0.5, {0: 0.8, 1: 0.8}), Rung(1.0, {0: 1.0, 1: 1.0})]
        >>> round(time_to_target(rungs, {0: 0.9, 1: 0.9}, higher_is_better=True).ratio, 3)
        0.707
    """
    sign = 1.0 if higher_is_better else -1.0
    rungs = sorted(ladder, key=lambda rung: rung.time)
    logs = np.log([rung.time for rung in rungs])
    samples = [sign * np.array(list(rung.scores.values())) for rung in rungs]
    target = sign * np.array(list(plain.values()))
    ratio = _cross(logs, np.array([values.mean() for values in samples])[None], target.mean(keepdims=True))[0]
    generator = np.random.default_rng(seed)

    def resample(values: np.ndarray) -> np.ndarray:
        draws = generator.integers(0, len(values), (_RESAMPLES, len(values)))
        means: np.ndarray = values[draws].mean(axis=1)
        return means

    drawn = _cross(logs, np.stack([resample(values) for values in samples], axis=1), resample(target))
    low, high = np.quantile(drawn, [ALPHA / 2, 1 - ALPHA / 2], method="higher")
    ends = [float(end) if math.isfinite(end) else None for end in (low, high)]
    if not math.isfinite(ratio):
        return Crossing(None, ends[0], None)
    return Crossing(float(ratio), ends[0], ends[1], at_most=bool(np.isclose(ratio, rungs[0].time)))


def _cross(logs: np.ndarray, means: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return, for each row of means, the time from which on it stays at or above its target; infinity for never."""
    below = means < targets[:, None]
    last = means.shape[1] - 1 - np.argmax(below[:, ::-1], axis=1)  # the last rung below the target
    rows, after = np.arange(len(means)), np.minimum(last + 1, means.shape[1] - 1)
    rise = means[rows, after] - means[rows, last]
    part = (targets - means[rows, last]) / np.where(rise > 0, rise, 1.0)
    times: np.ndarray = np.exp(logs[last] + part * (logs[after] - logs[last]))
    times = np.where(below.any(axis=1), times, math.exp(logs[0]))
    return np.where(below[:, -1], np.inf, times)
