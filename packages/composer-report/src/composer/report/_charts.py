"""Charts of a page as data for `assets/page.js`, which draws them with plotly."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer.report._groups import Group
from composer.report._html import Html, broken, el, number
from composer.report._model import Run, Series

SLOTS = 8  # colors
_BUDGET = 120_000  # points on a page
_MOST_POINTS, _FEWEST_POINTS = 700, 80
_MOST_KEYS = 8  # lines that a legend names; of more lines, it names only the first few
_FEW_KEYS = 3
_SMOOTH_FROM = 60  # number of values from which a noisy curve gets a smooth line
_SMOOTH_PART = 0.02  # half the window of the moving mean, as a fraction of the curve
_NOISY = 0.25  # a curve is noisy if its range is below this fraction of its total variation
_MOST_MARKS = 300
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, eq=False)
class Line:
    """A series in a chart.

    Attributes:
        name: The label.
        series: The values.
        run: The run of the series.
        slot: The index of the color.
        faint: Draw it in the background.
        spread: Lower and upper values of a band around it.
    """

    name: str
    series: Series
    run: Run
    slot: int
    faint: bool = False
    spread: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class Chart:
    """A chart.

    Attributes:
        title: The title.
        key: The name of the metric.
        lines: The series.
        wide: Use the whole width.
    """

    title: str
    key: str
    lines: Sequence[Line]
    wide: bool = False


@dataclass
class Charts:
    """The charts of a page. `draw` adds a chart and returns its element.

    Args:
        num_lines: Approximate number of lines, which limits the points of each.
        seconds: The longest time in a run, which determines the unit of the time axis.
    """

    num_lines: int
    seconds: float
    drawn: list[dict[str, Any]] = field(default_factory=list)
    has_time: bool = False
    has_epochs: bool = False

    @property
    def time_unit(self) -> tuple[str, float]:
        """The unit of the time axis, and its length in seconds."""
        if self.seconds < 180:
            return "seconds", 1.0
        return ("minutes", 60.0) if self.seconds < 3 * 3600 else ("hours", 3600.0)

    def draw(self, chart: Chart) -> Html:
        """Add a chart and return its element."""
        points = min(max(_BUDGET // max(self.num_lines, 1), _FEWEST_POINTS), _MOST_POINTS)
        curves = [curve_of(line.series.steps, line.series.seconds, line.series.values, points) for line in chart.lines]
        lines = [self._line(line, curve) for line, curve in zip(chart.lines, curves, strict=True)]
        least = [np.nanmin(c.values if c.low is None else c.low, initial=np.inf) for c in curves]
        positive = bool(min(least, default=0.0) > 0)
        return self.place({"kind": "lines", "lines": lines}, chart, _notes(chart, curves), positive)

    def place(self, data: dict[str, Any], chart: Chart, notes: Sequence[str] = (), positive: bool = False) -> Html:
        """Add a chart from its data and return its element."""
        self.drawn.append(data)
        name = f"chart-{len(self.drawn) - 1}"
        named = {line.name: line.slot for line in chart.lines if not line.faint}
        shown = len(named) if len(named) <= _MOST_KEYS else _FEW_KEYS
        keys = [colored(key, slot) for key, slot in list(named.items())[:shown]]
        if len(named) > shown:
            keys.append(el("span", f"and {len(named) - shown} more, named on hovering", class_="more"))
        return el(
            "figure",
            el(
                "figcaption",
                el("span", chart.title, class_="title"),
                el("code", broken(chart.key)) if chart.key else None,
                el("span", keys, class_="keys") if len(named) > 1 else None,
                el("button", "log", type="button", class_="log", data_chart=name, aria_pressed="false")
                if positive
                else None,
            )
            if chart.title
            else None,
            el("div", class_="chart", id=name, style=f"height:{data['height']}px" if "height" in data else None),
            [el("p", note, class_="flag") for note in notes],
            class_="wide" if chart.wide or len(named) > _MOST_KEYS else None,
        )

    def _line(self, line: Line, curve: Curve) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": line.name,
            "slot": line.slot % SLOTS,
            "dash": _DASHES[line.slot // SLOTS % len(_DASHES)],
            "xs": self._xs(line.run, curve.steps, curve.seconds),
            "y": packed(curve.smooth if line.faint and curve.smooth is not None else curve.values),
            "points": len(curve.values),
        }
        low, high = line.spread if line.spread is not None else (curve.low, curve.high)
        if low is not None and high is not None:
            data |= {"low": packed(low), "high": packed(high)}
        if curve.smooth is not None and not line.faint:
            data["smooth"] = packed(curve.smooth)
        if line.faint:
            data["faint"] = True
        if curve.num_bad:
            data["bad"] = self._xs(line.run, curve.bad_steps, curve.bad_seconds)
            data["num_bad"] = len(curve.bad_steps)
        return data

    def _xs(self, run: Run, steps: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
        xs = {"batch": packed(steps)}
        if len(seconds) and np.isfinite(seconds).all():
            xs["time"] = packed(seconds / self.time_unit[1])
            self.has_time = True
        epochs = epochs_at(run, steps)
        if epochs is not None:
            xs["epoch"] = packed(epochs)
            self.has_epochs = True
        return xs


@dataclass(frozen=True, eq=False)
class Curve:
    """The points of a series to draw.

    Attributes:
        steps: The step of each point.
        seconds: The time of each point.
        values: The curve; NaN is a gap.
        low: The minimum around each point. None: the curve has all values.
        high: The maximum around each point. None: the curve has all values.
        smooth: A moving mean. None: the curve is smooth enough, or is that mean.
        bad_steps: Steps of NaN or infinite values.
        bad_seconds: Times of NaN or infinite values.
        num_bad: Number of NaN or infinite values.
        total: Number of all values.
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
    """Reduce a series to about `points` points without hiding its extremes.

    A series of up to twice as many values is unchanged. A longer one is divided into equal parts, each with its mean,
    minimum and maximum, so that a spike of a single value is still visible.

    Args:
        steps: Shape (n,).
        seconds: Shape (n,).
        values: Shape (n,).
        points: Approximate number of points, at least 1.
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
    """Return the moving mean of values of shape (n,), n at least 1; NaN where a value is NaN."""
    half = max(2, round(len(values) * _SMOOTH_PART))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    total = counts[last] - counts[first]
    return np.where(finite, (sums[last] - sums[first]) / np.maximum(total, 1), np.nan)


def _is_noisy(values: np.ndarray) -> bool:
    """Return True if the total variation of a curve is much larger than its range."""
    known = values[np.isfinite(values)]
    if len(known) < _SMOOTH_FROM:
        return False
    variation = np.abs(np.diff(known)).sum()
    return bool(variation * _NOISY > known.max() - known.min() > 0)


def epochs_at(run: Run, steps: np.ndarray) -> np.ndarray | None:
    """Return the number of trained epochs at each step, with fractions; None if unknown."""
    if not run.epoch_starts:
        return None
    starts = dict(run.epoch_starts)
    epochs, batches = [float(epoch) for epoch in starts], [float(batch) for batch in starts.values()]
    length = batches[-1] - batches[-2] if len(batches) > 1 and batches[-1] > batches[-2] else run.epoch_batches
    if length:
        epochs.append(epochs[-1] + 1.0)
        batches.append(batches[-1] + float(length))
    interpolated: np.ndarray = np.interp(steps, batches, epochs)
    return interpolated


def mean_line(group: Group, name: str, slot: int) -> list[Line]:
    """Return the lines of a group in a metric: that of a single run, or the mean of several and each run faintly."""
    members = [(run, run.metrics[name]) for run in group.runs if name in run.metrics]
    if len(members) < 2:
        return [Line(group.name, series, run, slot) for run, series in members]
    steps = members[0][1].steps
    if any(len(s.steps) != len(steps) or (s.steps != steps).any() for _, s in members):
        return [Line(group.name, series, run, slot) for run, series in members]
    faint = [Line(group.name, series, run, slot, faint=True) for run, series in members]
    values = np.stack([series.values for _, series in members])
    with np.errstate(invalid="ignore"):
        mean, spread = values.mean(0), values.std(0, ddof=1)
    seconds = np.stack([series.seconds for _, series in members]).mean(0)
    mean_series = Series(name, steps, seconds, members[0][1].epochs, mean)
    # A long curve is reduced when it is drawn, and then shows the extremes around each point instead of this band.
    band = None if len(mean) > 2 * _FEWEST_POINTS else (mean - spread, mean + spread)
    return [*faint, Line(group.name, mean_series, members[0][0], slot, spread=band)]


def packed(values: np.ndarray) -> dict[str, str]:
    """Return an array in plotly's format: base64 of 32-bit numbers."""
    if np.issubdtype(values.dtype, np.integer) and (not len(values) or abs(values).max() < 2**31):
        array, kind = values.astype("<i4"), "i4"
    else:
        with np.errstate(over="ignore"):
            array, kind = values.astype("<f4"), "f4"
            array[np.isinf(array) & np.isfinite(values)] = np.nan
    return {"dtype": kind, "bdata": base64.b64encode(array.tobytes()).decode("ascii")}


def _notes(chart: Chart, curves: Sequence[Curve]) -> list[str]:
    notes = []
    for line, curve in zip(chart.lines, curves, strict=True):
        if curve.num_bad:
            label = f"{line.name}: " if len(chart.lines) > 1 else ""
            subject = "value is" if curve.num_bad == 1 else f"of {curve.total:,} values are"
            first = number(float(curve.bad_steps[0]))
            notes.append(f"{label}{curve.num_bad:,} {subject} NaN or infinite, the first at batch {first}.")
    return notes[:5]


def colored(name: str, slot: int) -> Html:
    """Return a name with its color in charts."""
    return el("span", name, class_=f"key c{slot % SLOTS}")


def group_names(groups: Sequence[Group]) -> list[Html]:
    """Return the names of groups with their colors in charts."""
    return [colored(group.name, slot) for slot, group in enumerate(groups)]
