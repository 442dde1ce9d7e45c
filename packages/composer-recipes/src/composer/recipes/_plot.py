"""The learning curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer.recipes._run import Result

__all__ = ["draw_curves", "save_curves"]

_COLORS = ("#6b7280", "#d55e00", "#0072b2", "#009e73", "#cc79a7")  # told apart by colour-blind readers too
_SHOWN_FROM = 0.25  # the part of the training whose curves may leave the picture


def save_curves(results: Sequence[Result], title: str, path: Path) -> None:
    """Draw the learning curves into a PNG file.

    Args:
        results: What came out.
        title: Stands above.
        path: The file.
    """
    draw_curves(results, title).savefig(path, dpi=150)


def draw_curves(results: Sequence[Result], title: str) -> Any:
    """Accuracy and cross entropy of the test images after each epoch: the mean over the seeds, and their range.

    Args:
        results: What came out.
        title: Stands above.

    Returns:
        A `matplotlib.figure.Figure`, which belongs to no window.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    seeds = len(results[0].runs)
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(1, 2)
    accuracy = [np.array([run.accuracy for run in result.runs]) * 100 for result in results]
    loss = [np.array([run.loss for run in result.runs]) for result in results]
    for panel, curves, unit in zip(panels, (accuracy, loss), ("%", ""), strict=True):
        for result, color, values in zip(results, _COLORS, curves, strict=False):
            _draw(panel, values, result.recipe.name, color, unit)
        panel.set_xlabel("epoch")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    _set_range(panels[0], accuracy, top=True)
    _set_range(panels[1], loss, top=False)
    panels[0].set(ylabel="test accuracy (%)", title="Accuracy")
    panels[1].set(ylabel="test cross entropy", title="Loss")
    band = f", mean and range of {seeds} seeds" if seeds > 1 else ", one seed"
    panels[0].legend(loc="lower right", title=f"recipe{band}", frameon=False)
    return figure
