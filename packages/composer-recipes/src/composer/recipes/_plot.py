"""The learning curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer.recipes._run import Result

__all__ = ["draw_curves", "save_curves"]

_COLORS = ("#6b7280", "#d55e00", "#0072b2", "#009e73", "#cc79a7")  # colour-blind readers can tell them apart too
_SETTLED = 0.25  # the part of the training after which all curves are in the picture


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
    figure.suptitle(title, fontsize=13)
    left, right = figure.subplots(1, 2)
    accuracy = [100 * np.array([run.accuracy for run in result.runs]) for result in results]
    loss = [np.array([run.loss for run in result.runs]) for result in results]
    names = [result.recipe.name for result in results]
    _draw(
        left, accuracy, [f"{name}: {values[:, -1].mean():.2f}%" for name, values in zip(names, accuracy, strict=True)]
    )
    _draw(right, loss, [f"{name}: {values[:, -1].mean():.4f}" for name, values in zip(names, loss, strict=True)])
    left.set(title="Accuracy", ylabel="test accuracy (%)", ylim=(_settled(accuracy, np.min), None))
    right.set(title="Loss", ylabel="test cross entropy", ylim=(0, _settled(loss, np.max)))
    seeds = len(results[0].runs)
    heading = f"at the end, mean of {seeds} seeds\n(band: lowest to highest)" if seeds > 1 else "at the end, one seed"
    left.legend(title=heading, loc="lower right", alignment="left")
    right.legend(title=heading, loc="upper right", alignment="left")
    return figure


def _draw(panel: Any, curves: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Each of `curves`, shape (runs, epochs), as a line through the means and a band from lowest to highest."""
    for values, label, color in zip(curves, labels, _COLORS, strict=False):
        epochs = np.arange(1, values.shape[1] + 1)
        marker = "o" if len(epochs) == 1 else None
        panel.plot(epochs, values.mean(axis=0), color=color, label=label, linewidth=2, marker=marker)
        panel.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    panel.set_xlabel("epoch")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _settled(curves: Sequence[np.ndarray], worst: Any) -> float:
    """The worst value that is left after the first part of the training, when curves are still far off."""
    return float(worst([worst(values[:, int(_SETTLED * (values.shape[1] - 1)) :]) for values in curves]))
