"""The results of a comparison: a table, learning curves, and JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import composer
from composer.recipes._parts import Dataset
from composer.recipes._results import Result, noise_of_time_to_quality, time_to_quality

_COLORS = ("#6b7280", "#d55e00", "#0072b2", "#009e73", "#cc79a7")  # distinguishable with color blindness
_VISIBLE_FROM = 0.25  # the fraction of the training after which all curves are inside of the plot


def print_report(results: Sequence[Result], console: Console) -> None:
    """Print a table of the results, and what each algorithm did.

    Args:
        results: The results; all are compared with the first.
        console: The console.
    """
    console.print(_table(results))
    for result in results[1:]:
        console.print(_verdict(results[0], result), highlight=False)
    for result in results:
        if result.recipe.algorithms:
            first = result.runs[0]
            console.print(f"\nWhen the algorithms of `{result.recipe.name}` act (engine.explain()):\n", highlight=False)
            console.print(result.plan, highlight=False, soft_wrap=True)
            console.print(f"\nWhat each of them did in the run from seed {first.seed}:\n", highlight=False)
            width = max(map(len, first.actions))
            for name, action in first.actions.items():
                console.print(f"  {name:<{width}}  {action}", highlight=False, soft_wrap=True)


def _table(results: Sequence[Result]) -> Table:
    seeds = [run.seed for run in results[0].runs]
    several = len(seeds) > 1
    spread = "mean and standard deviation" if several else "one run"
    table = Table(
        title=f"At the end, {spread} over {len(seeds)} seed{'s' if several else ''}",
        caption="Seconds and samples/s do not include evaluations.",
    )
    table.add_column("recipe")
    metrics = results[0].recipe.metrics
    for heading in (*(f"test {metric.title}" for metric in metrics), "seconds per run", "samples/s"):
        table.add_column(heading, justify="right")
    for result in results:
        values = [metric.show(result.mean(metric), result.spread(metric) if several else None) for metric in metrics]
        table.add_row(result.recipe.name, *values, f"{result.train_seconds:.1f}", f"{result.samples_per_second:,.0f}")
    return table


def _verdict(base: Result, other: Result) -> str:
    """Return sentences that compare two results: final metrics, training times, and time to the same quality."""
    metric, ratio = base.metric, other.train_seconds / base.train_seconds
    names = f"{base.recipe.name} -> {other.recipe.name}"
    values = f"test {metric.title} {metric.show(base.mean())} -> {metric.show(other.mean())}"
    reached = _time_to_quality(base, other)
    return f"{names}: {values}, in {ratio:.2f} times the training time.\n{_worse(base, other)}{reached}{_noise(base)}"


def _worse(base: Result, other: Result) -> str:
    """Return a line with the metrics, except the first, in which the second result is worse; "" if there is none."""
    texts = [
        f"{metric.title} ({metric.show(base.mean(metric))} -> {metric.show(other.mean(metric))})"
        for metric in base.recipe.metrics[1:]
        if not metric.reaches(other.mean(metric), base.mean(metric))
    ]
    return f"{other.recipe.name} is worse in test {', '.join(texts)}.\n" if texts else ""


def _time_to_quality(base: Result, other: Result) -> str:
    time = time_to_quality(base, other)
    goal = f"the {base.metric.show(time.goal)} that {base.recipe.name} has at its end"
    if time.mean is None:
        return f"{len(time.reached)} of {len(time.ratios)} runs of {other.recipe.name} reached and kept {goal}."
    several = f" +- {time.spread:.2f}" if len(time.ratios) > 1 else ""
    part = f"{time.mean:.2f}{several} of the time of {base.recipe.name}"
    return f"{other.recipe.name} reached and kept {goal}, after {part}."


def _noise(base: Result) -> str:
    """Return a line that compares runs of the first recipe with each other, to show how much is chance."""
    noise, name = noise_of_time_to_quality(base), base.recipe.name
    if noise is None:
        return ""
    times = ", ".join("not at all" if ratio is None else f"{ratio:.2f}" for ratio in noise.ratios)
    return f"\nFor comparison, each run of {name} against the mean of its other seeds: after {times} of its time."


def save_curves(results: Sequence[Result], title: str, path: Path) -> None:
    """Save the plot of `draw_curves` as a PNG file."""
    draw_curves(results, title).savefig(path, dpi=150)


def draw_curves(results: Sequence[Result], title: str) -> Any:
    """Plot each metric over the training time: the mean over the seeds, and the range.

    Args:
        results: The results.
        title: The title of the figure.

    Returns:
        A `matplotlib.figure.Figure` without a window.
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
            panel.set(ylim=(_y_limit(curves, np.min), None))
        else:
            panel.set(ylim=(None, _y_limit(curves, np.max)))
        location = "lower right" if metric.higher_is_better else "upper right"
        panel.legend(title=heading, loc=location, alignment="left")
    return figure


def _draw(panel: Any, times: Sequence[np.ndarray], curves: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Plot each of `curves`, shape (runs, evaluations), as a line of means and a band from lowest to highest."""
    for at, values, label, color in zip(times, curves, labels, _COLORS, strict=False):
        marker = "o" if len(at) == 1 else None
        panel.plot(at, values.mean(axis=0), color=color, label=label, linewidth=2, marker=marker)
        panel.fill_between(at, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _y_limit(curves: Sequence[np.ndarray], worst: Any) -> float:
    """Return the worst value after the first part of the training, in which values are far off."""
    return float(worst([worst(values[:, int(_VISIBLE_FROM * (values.shape[1] - 1)) :]) for values in curves]))


def as_json(results: Sequence[Result], dataset: Dataset) -> dict[str, Any]:
    """Return all results as values that JSON can represent.

    Args:
        results: The results; all are compared with the first.
        dataset: The data.
    """
    noise = noise_of_time_to_quality(results[0])
    return {
        "data": dataset.facts(),
        "machine": _machine(results[0]),
        "recipes": [_result_as_json(result) for result in results],
        "time_to_quality_of_other_seeds": None if noise is None else noise.ratios,
        "time_to_quality": {
            result.recipe.name: {"goal": time.goal, "mean": time.mean, "spread": time.spread, "ratios": time.ratios}
            for result, time in ((result, time_to_quality(results[0], result)) for result in results[1:])
        },
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the result of `as_json` to a file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _result_as_json(result: Result) -> dict[str, Any]:
    recipe = result.recipe
    parts: list[Any] = [recipe.data, recipe.network, recipe.training]
    values = {key: value for part in parts for key, value in asdict(part).items()}
    return {
        "name": recipe.name,
        "algorithms": [_as_text(algorithm) for algorithm in recipe.algorithms],
        "hyperparameters": {key: str(value) if isinstance(value, Path) else value for key, value in values.items()},
        "num_parameters": result.num_parameters,
        "summary": {
            **{metric.key: {"mean": result.mean(metric), "spread": result.spread(metric)} for metric in recipe.metrics},
            "train_seconds": result.train_seconds,
            "samples_per_second": result.samples_per_second,
        },
        "runs": [asdict(run) for run in result.runs],
        "plan": result.plan.splitlines(),
    }


def _as_text(algorithm: Any) -> str:
    """Return the `repr` of an algorithm, or its class name if the `repr` is only an address."""
    text = repr(algorithm)
    return type(algorithm).__name__ if " object at 0x" in text else text


def _machine(result: Result) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if result.device == "gpu" else result.device,
        "cores": os.cpu_count(),
        "threads": result.threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "composer": composer.__version__,
    }
