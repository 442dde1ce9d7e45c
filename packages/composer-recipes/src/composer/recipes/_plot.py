"""The learning curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer.recipes._results import Result

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
    """What each metric was over the time of training: the mean over the seeds, and their range.

    Args:
        results: What came out.
        title: Stands above.

    Returns:
        A `matplotlib.figure.Figure`, which belongs to no window.
    """
    from matplotlib.figure import Figure

    metrics = results[0].recipe.metrics
    figure = Figure(figsize=(5.5 * len(metrics), 4.6), layout="constrained")
    figure.suptitle(title, fontsize=13)
    seeds = len(results[0].runs)
    heading = f"at the end, mean of {seeds} seeds\n(band: lowest to highest)" if seeds > 1 else "at the end, one seed"
    for metric, panel in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0], strict=True):
        curves = [metric.scale * np.array([run.scores[metric.key] for run in result.runs]) for result in results]
        times = [np.mean([run.tested_at for run in result.runs], axis=0) for result in results]
        labels = [f"{result.recipe.name}: {metric.show(result.mean(metric))}" for result in results]
        _draw(panel, times, curves, labels)
        unit = f" ({metric.unit})" if metric.unit else ""
        panel.set(title=metric.title.capitalize(), xlabel="seconds of training", ylabel=f"test {metric.title}{unit}")
        if metric.higher_is_better:
            panel.set(ylim=(_settled(curves, np.min), None))
        else:
            panel.set(ylim=(None, _settled(curves, np.max)))
        place = "lower right" if metric.higher_is_better else "upper right"
        panel.legend(title=heading, loc=place, alignment="left")
    return figure


def _draw(panel: Any, times: Sequence[np.ndarray], curves: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Each of `curves`, shape (runs, evaluations), as a line through the means and a band from lowest to highest."""
    for at, values, label, color in zip(times, curves, labels, _COLORS, strict=False):
        marker = "o" if len(at) == 1 else None
        panel.plot(at, values.mean(axis=0), color=color, label=label, linewidth=2, marker=marker)
        panel.fill_between(at, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _settled(curves: Sequence[np.ndarray], worst: Any) -> float:
    """The worst value that is left after the first part of the training, when curves are still far off."""
    return float(worst([worst(values[:, int(_SETTLED * (values.shape[1] - 1)) :]) for values in curves]))
