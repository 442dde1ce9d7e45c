"""Charts as matplotlib figures without a window: for recipes, for composer-evidence and for the pictures of READMEs."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

BLUE, ORANGE, GRAY = "#1f77b4", "#ff7f0e", "#b8bec6"
COLORS = ("#6b7280", "#d55e00", "#0072b2", "#009e73", "#cc79a7")  # distinguishable with color blindness
STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first ships with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "composer",
}


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


def draw_bands(axes: Any, curves: Mapping[str, tuple[Any, np.ndarray]]) -> None:
    """Draw for each label the mean over some runs, and a band from the lowest to the highest.

    Args:
        axes: The axes.
        curves: Label -> positions of shape (points,), and values of shape (runs, points).
    """
    for index, (label, (at, values)) in enumerate(curves.items()):
        color = COLORS[index] if index < len(COLORS) else f"C{index}"
        marker = "o" if len(at) == 1 else None
        axes.plot(at, values.mean(axis=0), color=color, label=label, linewidth=2, marker=marker)
        axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def as_svg(draw: Callable[[], Figure], style: Mapping[Any, Any] | None = None) -> str:
    """Return a figure as an SVG file that is the same for the same figure.

    Args:
        draw: Returns the figure.
        style: Settings of matplotlib, beside `STYLE`.
    """
    file = io.StringIO()
    with matplotlib.rc_context(matplotlib.rcParamsDefault), matplotlib.rc_context({**STYLE, **(style or {})}):
        draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
