"""The charts of a page as data; `assets/page.js` draws them with plotly."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer.report._groups import Group
from composer.report._html import Html, broken, el, number
from composer.report._model import Run, Series
from composer.report._thin import Curve, curve_of

__all__ = ["SLOTS", "Chart", "Charts", "Line", "epochs_at", "mean_line", "packed"]

SLOTS = 8  # colours
_BUDGET = 120_000  # points on a page
_MOST_POINTS, _FEWEST_POINTS = 700, 80
_MOST_KEYS = 8  # in the legend of a chart; of more lines only the first few are named
_FEW_KEYS = 3
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, eq=False)
class Line:
    """A series in a chart.

    Attributes:
        name: What it is called there.
        series: The values.
        run: Whose they are.
        slot: The number of the colour.
        faint: Whether it stays in the background.
        spread: Values that are drawn as a band around it: one below and one above for each value.
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
        title: What it shows.
        key: The name of the metric.
        lines: The series.
        unit: Of the values.
        wide: Whether it takes the whole width.
    """

    title: str
    key: str
    lines: Sequence[Line]
    unit: str = ""
    wide: bool = False


@dataclass
class Charts:
    """The charts of a page. Each is added by `draw`, which returns its place in the page.

    Args:
        num_lines: About how many lines there will be, to keep the page small.
        seconds: The longest time in a run, which decides the unit of the time axis.
    """

    num_lines: int
    seconds: float
    drawn: list[dict[str, Any]] = field(default_factory=list)
    has_time: bool = False
    has_epochs: bool = False

    @property
    def time_unit(self) -> tuple[str, float]:
        """The unit of the time axis, and its seconds."""
        if self.seconds < 180:
            return "seconds", 1.0
        return ("minutes", 60.0) if self.seconds < 3 * 3600 else ("hours", 3600.0)

    def draw(self, chart: Chart) -> Html:
        """Add a chart."""
        points = min(max(_BUDGET // max(self.num_lines, 1), _FEWEST_POINTS), _MOST_POINTS)
        curves = [curve_of(line.series.steps, line.series.seconds, line.series.values, points) for line in chart.lines]
        lines = [self._line(line, curve) for line, curve in zip(chart.lines, curves, strict=True)]
        least = [np.nanmin(c.values if c.low is None else c.low, initial=np.inf) for c in curves]
        positive = bool(min(least, default=0.0) > 0)
        return self.place({"kind": "lines", "lines": lines, "unit": chart.unit}, chart, _notes(chart, curves), positive)

    def place(self, data: dict[str, Any], chart: Chart, notes: Sequence[str] = (), positive: bool = False) -> Html:
        """Add a chart whose data are made already."""
        self.drawn.append(data)
        name = f"chart-{len(self.drawn) - 1}"
        named = {line.name: line.slot for line in chart.lines if not line.faint}
        shown = len(named) if len(named) <= _MOST_KEYS else _FEW_KEYS
        keys = [_key(key, slot) for key, slot in list(named.items())[:shown]]
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


def epochs_at(run: Run, steps: np.ndarray) -> np.ndarray | None:
    """How many epochs were trained at each step, with fractions; None if it is not known."""
    if not run.epoch_starts:
        return None
    starts = dict(run.epoch_starts)
    epochs, batches = [float(epoch) for epoch in starts], [float(batch) for batch in starts.values()]
    length = batches[-1] - batches[-2] if len(batches) > 1 and batches[-1] > batches[-2] else run.epoch_batches
    if length:
        epochs.append(epochs[-1] + 1.0)
        batches.append(batches[-1] + float(length))
    found: np.ndarray = np.interp(steps, batches, epochs)
    return found


def mean_line(group: Group, name: str, slot: int) -> list[Line]:
    """The lines of a group in a metric: of one run its own; of several the mean with its spread, and each faintly."""
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
    whole = Series(name, steps, seconds, members[0][1].epochs, mean)
    return [*faint, Line(group.name, whole, members[0][0], slot, spread=_if_short(mean, spread))]


def _if_short(mean: np.ndarray, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The band of one standard deviation; of a long curve none, because the curve is thinned."""
    return None if len(mean) > 2 * _FEWEST_POINTS else (mean - spread, mean + spread)


def packed(values: np.ndarray) -> dict[str, str]:
    """An array as plotly reads it, base64 of 32 bits a number."""
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
            whose = f"{line.name}: " if len(chart.lines) > 1 else ""
            what = "value is" if curve.num_bad == 1 else f"of {curve.total:,} values are"
            first = number(float(curve.bad_steps[0]))
            notes.append(f"{whose}{curve.num_bad:,} {what} NaN or infinite, the first at batch {first}.")
    return notes[:5]


def _key(name: str, slot: int) -> Html:
    return el("span", name, class_=f"key c{slot % SLOTS}")
