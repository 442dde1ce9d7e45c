"""Makes long curves short enough to draw, without hiding their extremes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

__all__ = ["Curve", "curve_of", "smoothed"]

_SMOOTH_FROM = 60  # values from which a noisy curve gets a smooth line
_SMOOTH_PART = 0.02  # of the curve, that one value of the smooth line is the mean of
_NOISY = 0.25  # of the total variation, below which a curve counts as smooth by itself
_MOST_MARKS = 300


@dataclass(frozen=True, eq=False)
class Curve:
    """What is drawn of a series.

    Attributes:
        steps: Of each point.
        seconds: Of each point.
        values: The curve; NaN is a gap.
        low: The least value around each point; None: the curve has all values.
        high: The greatest value around each point; None: the curve has all values.
        smooth: A moving mean; None: the curve is smooth enough, or is that mean.
        bad_steps: Where values are NaN or infinite.
        bad_seconds: The same.
        num_bad: How many are.
        total: How many values the series has.
    """

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    smooth: np.ndarray | None
    bad_steps: np.ndarray
    bad_seconds: np.ndarray
    num_bad: int
    total: int


def curve_of(steps: np.ndarray, seconds: np.ndarray, values: np.ndarray, points: int) -> Curve:
    """Thin a series to a number of points.

    A series of up to twice as many values is kept as it is. A longer one is cut into equal parts; of each part, the
    mean, the least and the greatest value are kept, so that a spike of a single value still shows.

    Args:
        steps: Shape (n,).
        seconds: Shape (n,).
        values: Shape (n,).
        points: About how many points to keep, at least 1.
    """
    finite = np.isfinite(values)
    bad = np.flatnonzero(~finite)
    shown = bad[np.linspace(0, len(bad) - 1, min(len(bad), _MOST_MARKS)).astype(int)] if len(bad) else bad
    marks = steps[shown], seconds[shown], len(bad), len(values)
    values = np.where(finite, values, np.nan)
    if len(values) <= 2 * points:
        smooth = smoothed(values) if _is_noisy(values) else None
        return Curve(steps, seconds, values, None, None, smooth, *marks)
    edges = np.linspace(0, len(values), points + 1).astype(int)
    middles = (edges[:-1] + edges[1:] - 1) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a part without a finite value is a gap
        filled = np.where(finite, values, np.inf)
        low = np.minimum.reduceat(filled, edges[:-1])
        high = np.maximum.reduceat(np.where(finite, values, -np.inf), edges[:-1])
        counts = np.add.reduceat(finite.astype(np.int64), edges[:-1])
        mean = np.add.reduceat(np.where(finite, values, 0.0), edges[:-1]) / counts
    empty = counts == 0
    low[empty] = high[empty] = np.nan
    line = smoothed(mean) if _is_noisy(mean) else mean
    return Curve(steps[middles], seconds[middles], line, low, high, None, *marks)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of the values around each; NaN where the value is NaN.

    Args:
        values: Shape (n,), n at least 1.
    """
    half = max(2, round(len(values) * _SMOOTH_PART))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    total = counts[last] - counts[first]
    return np.where(finite, (sums[last] - sums[first]) / np.maximum(total, 1), np.nan)


def _is_noisy(values: np.ndarray) -> bool:
    """Whether a curve goes up and down much more than it gets anywhere."""
    known = values[np.isfinite(values)]
    if len(known) < _SMOOTH_FROM:
        return False
    travelled = np.abs(np.diff(known)).sum()
    return bool(travelled * _NOISY > known.max() - known.min() > 0)
