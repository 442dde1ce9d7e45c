"""Charts of a page as SVG without scripts: a forest plot, a scatter of cost and gain, curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from composer.report.spi import Html, el, number

_WIDTH = 440  # narrow, so that text stays readable where the picture is scaled to the screen of a phone
_LEFT, _RIGHT = 150, 16
_COLORS = {"gain": "var(--good)", "loss": "var(--bad)"}


@dataclass(frozen=True)
class Row:
    """A method in a forest plot.

    Attributes:
        name: The label.
        effect: The effect; positive is better.
        low: Lower end of its interval.
        high: Upper end.
        word: The verdict.
    """

    name: str
    effect: float
    low: float
    high: float
    word: str


@dataclass(frozen=True)
class Dot:
    """A method in a scatter.

    Attributes:
        name: The label.
        cost: Its step time, relative to plain.
        effect: The effect at equal steps.
        word: The verdict.
    """

    name: str
    cost: float
    effect: float
    word: str


def forest(rows: Sequence[Row], unit: str) -> Html:
    """Return a forest plot: effects with intervals, the best first.

    Args:
        rows: The methods.
        unit: The unit of effects.
    """
    rows = sorted(rows, key=lambda row: -row.effect)
    span = [0.0, *(row.low for row in rows), *(row.high for row in rows)]
    axis = _Axis(min(span), max(span), _LEFT, _WIDTH - _RIGHT)
    height = 24 * len(rows) + 44
    parts = [axis.grid(height - 34, unit), _line(axis.at(0), 4, axis.at(0), height - 34, "var(--ink)")]
    for i, row in enumerate(rows):
        y, color = 24 * i + 18, _COLORS.get(row.word, "var(--soft)")
        title = el("title", f"{row.name}: {row.effect:+.4g} [{row.low:+.4g}, {row.high:+.4g}] {row.word}")
        parts += [
            _text(_shorten(row.name), _LEFT - 10, y + 4, "end"),
            _line(axis.at(row.low), y, axis.at(row.high), y, color, 2),
            el("circle", title, cx=_round(axis.at(row.effect)), cy=y, r=4.5, style=f"fill:{color}"),
        ]
    return _svg(parts, height, f"Effects of {len(rows)} methods with 95 % intervals")


def scatter(dots: Sequence[Dot], unit: str) -> Html:
    """Return cost against gain, with a line through the methods that no other one beats in both.

    Args:
        dots: The methods.
        unit: The unit of effects.
    """
    height = 300
    costs, effects = [1.0, *(dot.cost for dot in dots)], [0.0, *(dot.effect for dot in dots)]
    x = _Axis(min(costs), max(costs), 62, _WIDTH - 60)
    y = _Axis(min(effects), max(effects), height - 52, 16)
    parts: list[object] = [x.grid(height - 42, "step time / plain"), y.side(62, _WIDTH - 20, unit)]
    parts.append(_line(x.at(1), 10, x.at(1), height - 42, "var(--soft)"))
    parts.append(_line(62, y.at(0), _WIDTH - 20, y.at(0), "var(--soft)"))
    front = _front([Dot("plain", 1.0, 0.0, ""), *dots])
    points = " ".join(f"{_round(x.at(dot.cost))},{_round(y.at(dot.effect))}" for dot in front)
    parts.append(el("polyline", points=points, style="fill:none;stroke:var(--accent);stroke-dasharray:4 3"))
    for dot in dots:
        color = _COLORS.get(dot.word, "var(--soft)")
        title = el("title", f"{dot.name}: {dot.effect:+.4g} at {dot.cost:.3g} times the time of plain")
        parts.append(
            el("circle", title, cx=_round(x.at(dot.cost)), cy=_round(y.at(dot.effect)), r=4.5, style=f"fill:{color}")
        )
        if dot in front or dot.word in _COLORS:
            parts.append(_text(_shorten(dot.name, 14), x.at(dot.cost) + 7, y.at(dot.effect) - 6, "start", 10.5))
    return _svg(parts, height, "Cost against gain")


def curves(lines: Mapping[str, Sequence[Sequence[tuple[int, float]]]], title: str) -> Html:
    """Return curves: the mean over the runs of each name, and a band from the lowest to the highest run.

    Args:
        lines: Name -> for each run pairs of a step and a value, the same steps in all runs of a name.
        title: The label of the values.
    """
    height = 280
    values = [value for runs in lines.values() for run in runs for _, value in run]
    steps = [step for runs in lines.values() for run in runs for step, _ in run]
    x, y = _Axis(0, max(steps), 62, _WIDTH - 20), _Axis(min(values), max(values), height - 72, 12)
    parts: list[object] = [x.grid(height - 62, "steps"), y.side(62, _WIDTH - 20, title)]
    for i, (name, runs) in enumerate(lines.items()):
        color = f"var(--c{i % 8})"
        at = [x.at(step) for step, _ in runs[0]]
        table = np.array([[value for _, value in run] for run in runs])
        low, mean, high = (
            [y.at(value) for value in row] for row in (table.min(axis=0), table.mean(axis=0), table.max(axis=0))
        )
        band = [*zip(at, high, strict=True), *reversed(list(zip(at, low, strict=True)))]
        parts.append(el("polygon", points=_points(band), style=f"fill:{color};opacity:.15"))
        line = _points(list(zip(at, mean, strict=True)))
        parts.append(el("polyline", points=line, style=f"fill:none;stroke:{color};stroke-width:2"))
        parts.append(
            el("text", name, x=66 + 124 * (i % 3), y=height - 20 + 14 * (i // 3), style=f"fill:{color};font-size:11px")
        )
    return _svg(parts, height + 14 * ((len(lines) - 1) // 3), "Learning curves")


class _Axis:
    """A linear axis from values to positions."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        self.low, self.high, self.start, self.end = low - margin, high + margin, start, end

    def at(self, value: float) -> float:
        """Return the position of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return three to six round values."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]

    def grid(self, bottom: float, label: str) -> list[Html]:
        """Return vertical lines with values below them."""
        parts = []
        for tick in self.ticks():
            parts += [
                _line(self.at(tick), 4, self.at(tick), bottom, "var(--line)"),
                _text(number(tick, 3), self.at(tick), bottom + 14, "middle", 10.5, "var(--soft)"),
            ]
        return [*parts, _text(label, self.end, bottom + 29, "end", 10.5, "var(--soft)")]

    def side(self, left: float, right: float, label: str) -> list[Html]:
        """Return horizontal lines with values on their left."""
        parts = []
        for tick in self.ticks():
            parts += [
                _line(left, self.at(tick), right, self.at(tick), "var(--line)"),
                _text(number(tick, 3), left - 6, self.at(tick) + 4, "end", 10.5, "var(--soft)"),
            ]
        return [*parts, _text(label, left + 4, self.end + 4, "start", 10.5, "var(--soft)")]


def _front(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots that no other one beats in cost and effect, by cost."""
    front: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.cost, -dot.effect)):
        if not front or dot.effect > front[-1].effect:
            front.append(dot)
    return front


def _svg(parts: Sequence[object], height: float, label: str) -> Html:
    box = f"0 0 {_WIDTH} {height}"
    style = "width:100%;max-width:44rem;height:auto;display:block"
    return el("svg", *parts, viewBox=box, role="img", aria_label=label, style=style, xmlns="http://www.w3.org/2000/svg")


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> Html:
    x1, y1, x2, y2 = map(_round, (x1, y1, x2, y2))
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, style=f"stroke:{color};stroke-width:{width}")


def _text(value: str, x: float, y: float, anchor: str, size: float = 12, color: str = "var(--ink)") -> Html:
    style = f"fill:{color};font-size:{size}px;text-anchor:{anchor}"
    return el("text", value, x=_round(x), y=_round(y), style=style)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_round(x)},{_round(y)}" for x, y in pairs)


def _round(value: float) -> float:
    return round(value, 1)


def _shorten(name: str, length: int = 21) -> str:
    return name if len(name) <= length else f"{name[: length - 2]}.."
