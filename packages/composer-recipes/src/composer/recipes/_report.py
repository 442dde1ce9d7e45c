"""What a comparison says at its end: a table, what the algorithms did, and everything as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import composer
from composer.recipes._parts import Dataset
from composer.recipes._results import Result, TimeToQuality, noise_of_time_to_quality, time_to_quality

__all__ = ["as_json", "print_report", "write_json"]


def print_report(results: Sequence[Result], console: Console) -> None:
    """Print the table, and what each algorithm did.

    Args:
        results: What came out; the first is what the others are compared with.
        console: Where to print.
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
            width = max(map(len, first.deeds))
            for name, deed in first.deeds.items():
                console.print(f"  {name:<{width}}  {deed}", highlight=False, soft_wrap=True)


def _table(results: Sequence[Result]) -> Table:
    seeds = [run.seed for run in results[0].runs]
    several = len(seeds) > 1
    spread = "mean and standard deviation" if several else "one run"
    table = Table(
        title=f"At the end, {spread} over {len(seeds)} seed{'s' if several else ''}",
        caption="Evaluations are left out of seconds and samples/s.",
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
    """How two results compare: what they came to, in what time, and how soon the second was as good as the first."""
    metric, ratio = base.metric, other.train_seconds / base.train_seconds
    names = f"{base.recipe.name} -> {other.recipe.name}"
    values = f"test {metric.title} {metric.show(base.mean())} -> {metric.show(other.mean())}"
    soon = _soon(base, other, time_to_quality(base, other))
    return f"{names}: {values}, in {ratio:.2f} times the training time.\n{_worse(base, other)}{soon}{_noise(base)}"


def _worse(base: Result, other: Result) -> str:
    """A line with the metrics beside the first in which the second result is worse; empty if there is none."""
    texts = [
        f"{metric.title} ({metric.show(base.mean(metric))} -> {metric.show(other.mean(metric))})"
        for metric in base.recipe.metrics[1:]
        if not metric.reaches(other.mean(metric), base.mean(metric))
    ]
    return f"{other.recipe.name} is worse in test {', '.join(texts)}.\n" if texts else ""


def _soon(base: Result, other: Result, found: TimeToQuality) -> str:
    goal = f"the {base.metric.show(found.goal)} that {base.recipe.name} has at its end"
    if found.mean is None:
        return f"{len(found.reached)} of {len(found.ratios)} runs of {other.recipe.name} reached and kept {goal}."
    several = f" +- {found.spread:.2f}" if len(found.ratios) > 1 else ""
    part = f"{found.mean:.2f}{several} of the time of {base.recipe.name}"
    return f"{other.recipe.name} reached and kept {goal}, after {part}."


def _noise(base: Result) -> str:
    """A line with how much of that is chance: runs of the first recipe against each other."""
    found, name = noise_of_time_to_quality(base), base.recipe.name
    if found is None:
        return ""
    times = ", ".join("not at all" if ratio is None else f"{ratio:.2f}" for ratio in found.ratios)
    return f"\nFor comparison, each run of {name} against the mean of its other seeds: after {times} of its time."


def as_json(results: Sequence[Result], dataset: Dataset) -> dict[str, Any]:
    """All results as plain values.

    Args:
        results: What came out; the first is what the others are compared with.
        dataset: What was trained on.
    """
    noise = noise_of_time_to_quality(results[0])
    return {
        "data": dataset.facts(),
        "machine": _machine(results[0]),
        "recipes": [_result_as_json(result) for result in results],
        "time_to_quality_of_other_seeds": None if noise is None else noise.ratios,
        "time_to_quality": {
            result.recipe.name: {"goal": found.goal, "mean": found.mean, "spread": found.spread, "ratios": found.ratios}
            for result, found in ((result, time_to_quality(results[0], result)) for result in results[1:])
        },
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write values to a file.

    Args:
        path: The file.
        content: What `as_json` returned.
    """
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
    """The algorithm as it would be written, if it says so, and never an address."""
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
