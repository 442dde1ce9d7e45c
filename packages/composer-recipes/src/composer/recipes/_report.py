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
from composer.recipes._data import ImageData
from composer.recipes._run import Result

__all__ = ["as_json", "print_report", "write_json"]

_SOURCES = {
    "digits": "the handwritten digits of scikit-learn",
    "Fashion-MNIST": "Fashion-MNIST",
    "CIFAR-10": "CIFAR-10",
}


def describe_data(images: ImageData) -> str:
    """The data set and its split, in a line."""
    channels, height, width = images.shape
    return (
        f"{_SOURCES.get(images.name, images.name)}: {len(images.train_images):,} images to train on, "
        f"{len(images.test_images):,} to test, {channels}x{height}x{width} pixels, {images.num_classes} classes"
    )


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
    epochs = results[0].recipe.training.epochs
    spread = "mean and standard deviation" if len(seeds) > 1 else "one run"
    table = Table(
        title=f"After {epochs} epochs, {spread} over {len(seeds)} seed{'s' if len(seeds) > 1 else ''}",
        caption="Evaluations are left out of seconds and images/s.",
    )
    table.add_column("recipe")
    for heading in ("test accuracy", "test cross entropy", "seconds per run", "images/s"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.recipe.name,
            _percent(result.accuracy, result.accuracy_spread if len(seeds) > 1 else None),
            f"{result.loss:.4f}",
            f"{result.train_seconds:.1f}",
            f"{result.images_per_second:,.0f}",
        )
    return table


def _percent(mean: float, spread: float | None) -> str:
    return f"{100 * mean:.2f}%" if spread is None else f"{100 * mean:.2f} +- {100 * spread:.2f}%"


def _verdict(base: Result, other: Result) -> str:
    """How the errors and the time of two results compare."""
    before, after = 1 - base.accuracy, 1 - other.accuracy
    errors = f"{100 * before:.2f}% -> {100 * after:.2f}% test errors"
    if before > 0:
        change = (after - before) / before
        errors += f" ({abs(change):.0%} {'fewer' if change <= 0 else 'more'})"
    ratio = other.train_seconds / base.train_seconds
    return f"{base.recipe.name} -> {other.recipe.name}: {errors}, in {ratio:.2f} times the training time."


def as_json(results: Sequence[Result], images: ImageData) -> dict[str, Any]:
    """All results as plain values.

    Args:
        results: What came out.
        images: What was trained on.
    """
    return {
        "data": {
            "name": images.name,
            "train_images": len(images.train_images),
            "test_images": len(images.test_images),
            "shape": list(images.shape),
            "num_classes": images.num_classes,
            "shift": images.shift,
            "flip": images.flip,
        },
        "machine": _machine(results[0].device),
        "recipes": [_result_as_json(result) for result in results],
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
    return {
        "name": recipe.name,
        "algorithms": [_as_text(algorithm) for algorithm in recipe.algorithms],
        "hyperparameters": {
            **asdict(recipe.data),
            "data": None if recipe.data.data is None else str(recipe.data.data),
            **asdict(recipe.network),
            **asdict(recipe.training),
        },
        "num_parameters": result.num_parameters,
        "summary": {
            "accuracy": result.accuracy,
            "accuracy_spread": result.accuracy_spread,
            "loss": result.loss,
            "train_seconds": result.train_seconds,
            "images_per_second": result.images_per_second,
        },
        "runs": [asdict(run) for run in result.runs],
        "plan": result.plan.splitlines(),
    }


def _as_text(algorithm: Any) -> str:
    """The algorithm as it would be written, if it says so, and never an address."""
    text = repr(algorithm)
    return type(algorithm).__name__ if " object at 0x" in text else text


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "gpu" else device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "composer": composer.__version__,
    }
