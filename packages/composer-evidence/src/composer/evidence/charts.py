"""Charts of a ledger: effects, cost against gain, curves, and the ladders of stacks.

They are static pictures, for the page without scripts and for READMEs; composer-report draws runs interactively.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from composer.recipes import Metric
from composer.report.spi import Html, el

BLUE, ORANGE, GRAY = "#1f77b4", "#e06c00", "#878f99"
STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first ships with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "composer",
}
_LINES = ("#6b7280", "#d55e00", "#0072b2", "#009e73", "#cc79a7")  # distinguishable with color blindness
_COLORS = {"gain": BLUE, "loss": ORANGE}
_INK = "#010101"  # matplotlib omits black, so that a page could not replace it
# A picture is shown by pages that cannot style it, so it follows the reader's system itself; hues keep their names.
_DARK = "@media (prefers-color-scheme: dark){svg{filter:invert(.88) hue-rotate(180deg)}}"
_OF_PAGE = {_INK: "--ink", BLUE: "--good", ORANGE: "--bad", GRAY: "--soft"}
_OF_PAGE |= {color: f"--c{index}" for index, color in enumerate(_LINES)}
_KEYS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def make_axes(xlabel: str = "", ylabel: str = "", width: float = 6.4, height: float = 2.4) -> tuple[Figure, Any]:
    """Return a figure without a window, and its only axes.

    Args:
        xlabel: The label of the horizontal axis.
        ylabel: The label of the vertical axis.
        width: Inches.
        height: Inches.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def as_svg(draw: Callable[[], Figure], style: Mapping[Any, Any] | None = None) -> str:
    """Return a figure as an SVG file that is the same for the same figure, and dark for readers of dark pages.

    Args:
        draw: Returns the figure.
        style: Settings of matplotlib, beside `STYLE`.
    """
    file = io.StringIO()
    with matplotlib.rc_context(matplotlib.rcParamsDefault), matplotlib.rc_context({**STYLE, **(style or {})}):
        draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace("</style>", f"{_DARK}</style>", 1)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def inline(draw: Callable[[], Figure], label: str) -> Html:
    """Return a chart as an element of a page, with the colors that the page has in its light and its dark mode.

    Args:
        draw: Returns the figure.
        label: What it shows, for readers who cannot see it.
    """
    svg = as_svg(draw, {"font.size": 12, "savefig.transparent": True, **dict.fromkeys(_KEYS, _INK)})
    box = re.findall(r'viewBox="(.+?)"', svg)[0]
    body = re.sub(r"<(style|metadata).*?</\1>", "", svg.partition("<svg")[2].partition(">")[2], flags=re.DOTALL)
    for color, variable in _OF_PAGE.items():
        body = body.replace(color, f"var({variable})")
    drawn = Html(body.replace("xlink:href", "href").removesuffix("</svg>\n"))
    style = "width:100%;max-width:44rem;height:auto;display:block"
    return el("svg", drawn, viewBox=box, role="img", aria_label=label, style=style, xmlns="http://www.w3.org/2000/svg")


def effects(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Show effects with their intervals, the best above.

    Args:
        entries: Entries with a comparison, about methods on one task.
    """
    shown = sorted(entries, key=lambda entry: float(entry["comparison"]["effect"]))
    metric = Metric(**shown[0]["metric"])
    label = f"{_titled(metric)} of {shown[0]['task']}:\ndifference to plain training"
    figure, axes = make_axes(label, height=0.6 + 0.22 * len(shown))
    for row, entry in enumerate(shown):
        low, middle, high = (metric.scale * entry["comparison"][key] for key in ("low", "effect", "high"))
        color = _COLORS.get(entry["verdict"]["word"], GRAY)
        axes.plot([low, high], [row, row], color=color, linewidth=2)
        axes.plot(middle, row, marker="o", color=color)
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set(yticks=range(len(shown)), yticklabels=[_short(e["method"]) for e in shown], ylim=(-0.7, len(shown) - 0.3))
    return figure


def costs(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Show cost against gain, with a line through the methods that no other one beats in both.

    Args:
        entries: Entries with a comparison and a step time, about methods on one task.
    """
    metric = Metric(**entries[0]["metric"])
    figure, axes = make_axes("step time / plain", f"effect on {metric.title}", height=4)
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.axvline(1, color=GRAY, linewidth=0.8)
    dots = [(1.0, 0.0, "plain", "")]
    for entry in entries:
        cost, effect = entry["step_time"]["ratio"], metric.scale * entry["comparison"]["effect"]
        dots.append((cost, effect, entry["method"], entry["verdict"]["word"]))
    front: list[tuple[float, float, str, str]] = []
    for dot in sorted(dots, key=lambda dot: (dot[0], -dot[1])):
        if not front or dot[1] > front[-1][1]:
            front.append(dot)
    axes.plot([dot[0] for dot in front], [dot[1] for dot in front], color=BLUE, linewidth=1, linestyle="--")
    named = sorted((dot for dot in dots if dot[3] in _COLORS or dot in front), key=lambda dot: dot[1])
    heights = np.linspace(0.02, 0.98, len(named))
    for cost, effect, _, word in dots[1:]:
        axes.plot(cost, effect, marker="o", color=_COLORS.get(word, GRAY))
    # The names stand in a column beside the plot, in the order of their effects, so that none covers another.
    for (cost, effect, name, _), height in zip(named, heights, strict=True):
        axes.annotate(
            _short(name),
            (cost, effect),
            (1.03, height),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "color": GRAY, "linewidth": 0.6, "relpos": (0, 0.5)},
        )
    return figure


def curves(entries: Sequence[Mapping[str, Any]], runs: Mapping[str, np.ndarray]) -> Figure:
    """Show learning curves on the validation part.

    Args:
        entries: Entries of one task; at least one.
        runs: Name -> steps and values of its runs, shape (runs, points, 2), the same steps in all runs.
    """
    metric = Metric(**entries[0]["metric"])
    figure, axes = make_axes("steps", _titled(metric), height=4)
    for index, (name, values) in enumerate(runs.items()):
        color = _LINES[index] if index < len(_LINES) else f"C{index}"
        steps, scores = values[0, :, 0], metric.scale * values[:, :, 1]
        axes.plot(steps, scores.mean(axis=0), color=color, label=name, linewidth=2)
        axes.fill_between(steps, scores.min(axis=0), scores.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def ladders(stacks: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> Figure:
    """Show complete runs of each length, of stacks and of plain training.

    Args:
        stacks: Entries about a stack with a time to target, one for each task; at least one.
        plain: The entry about plain's ladder on each of these tasks.
    """
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    for axes, stack, base in zip(figure.subplots(1, len(stacks), squeeze=False)[0], stacks, plain, strict=True):
        reached, metric, full = stack["time_to_target"], Metric(**stack["metric"]), stack["steps"]
        lines = {
            "plain": (GRAY, [(rung["steps"] / full, rung["scores"]) for rung in base["rungs"]]),
            "stack": (BLUE, [(rung["time"], rung["scores"]) for rung in reached["rungs"]]),
        }
        for label, (color, rungs) in lines.items():
            rungs.sort(key=lambda rung: rung[0])
            scores = [metric.scale * np.array([*values.values()]) for _, values in rungs]
            means, spread = [each.mean() for each in scores], [each.std(ddof=1) for each in scores]
            times = [time for time, _ in rungs]
            axes.errorbar(times, means, spread, color=color, linewidth=2, marker="o", capsize=3, label=label)
        target = metric.scale * sum(stack["control_scores"].values()) / len(stack["control_scores"])
        up = metric.higher_is_better
        axes.axhline(target, color=_INK, linewidth=0.8, linestyle=":")
        # Where no curve is: above the line at the right, or below it at the left.
        text, x, place = f"after {reached['method']['ratio']:.2f}", 0.98 if up else 0.02, (0, 4 if up else -10)
        by_line, side = axes.get_yaxis_transform(), "right" if up else "left"
        axes.annotate(text, (x, target), place, xycoords=by_line, textcoords="offset points", ha=side)
        axes.set_title(f"{stack['task']}\n{textwrap.fill(' + '.join(stack['method'].split('+')), 32)}", fontsize=8)
        axes.set(xlabel=f"time / plain's {full} steps", ylabel=_titled(metric))
        axes.legend(frameon=False, loc="lower right" if up else "upper right")
    return figure


def _titled(metric: Metric) -> str:
    return f"{metric.title}, {metric.unit}" if metric.unit else metric.title


def _short(name: str) -> str:
    """Return a name of at most 21 letters, in which each member of a stack can be told."""
    members = name.split("+")
    room = 21 if len(name) <= 21 else (22 - len(members)) // len(members)
    return "+".join(member if len(member) <= room else f"{member[: room - 2]}.." for member in members)
