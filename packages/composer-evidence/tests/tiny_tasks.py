"""Tasks that train in a moment. Processes of runs import this module."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer.datasets.device_loader import DeviceLoader
from composer.evidence import Grid, Task, Variant
from composer.evidence.run import machine_lock
from composer.models import ComposerClassifier, ComposerModel
from composer.recipes import AdamW, Metric

ACCURACY = Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2)


@dataclass(frozen=True)
class Points:
    """Points on a plane with two classes, divided by a line."""

    count: int = 64
    folder: Path | None = None

    def loaders(self, part: str, seed: int, device: Any) -> tuple[Any, Any]:
        parts = {"train": 0, "validation": 1, "test": 2}
        train, other = self._part(parts["train"]), self._part(parts[part])
        return (
            DeviceLoader(*train, 16, device=device, seed=seed),
            DeviceLoader(*other, 64, device=device, shuffle=False),
        )

    def _part(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        points = torch.randn(self.count, 2, generator=torch.Generator().manual_seed(index))
        return points, (points.sum(dim=1) > 0).long()

    def digest(self) -> str:
        return str(self.count)


def load(folder: Path | None) -> Points:
    return Points(folder=folder)


def network(width: int, data: Points) -> ComposerModel:
    hidden = nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()
    module = nn.Sequential(nn.Linear(2, width), nn.ReLU(), *hidden, nn.Linear(width, 2))
    return ComposerClassifier(module, num_classes=2)


def network_that_dies(width: int, data: Points) -> ComposerModel:
    """Kill the process in its first attempt."""
    assert data.folder is not None
    flag = data.folder / "died"
    if not flag.exists():
        flag.touch()
        os._exit(9)
    return network(width, data)


def network_that_always_dies(width: int, data: Points) -> ComposerModel:
    os._exit(9)


def tiny(make: Any = network, **others: Any) -> Task:
    values: dict[str, Any] = {
        "name": "tiny",
        "version": 1,
        "summary": "Points on a plane.",
        "data": load,
        "variants": {"adamw": Variant(partial(make, 8), AdamW(lr=1e-2), {"lr": Grid((3e-3, 1e-2))})},
        "metric": ACCURACY,
        "steps": 8,
        "ladder": (0.5, 1.0),
    }
    return Task(**{**values, **others})


def images() -> Task:
    """Return the task with all its methods of one kind of input, and without those for others."""
    return tiny(kind="images", judges_regularizers=False, not_judged={"SAM": "it is slow"})


def network_that_reports_the_lock(width: int, data: Points) -> ComposerModel:
    """Write to a file whether the lock of the machine is held, and how."""
    assert data.folder is not None
    held = "alone"
    with machine_lock().open("a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        held = "shared"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = "free"
    (data.folder / "held").write_text(held)
    return network(width, data)


def network_that_fails(width: int, data: Points) -> ComposerModel:
    raise KeyError("no such layer")


@dataclass(frozen=True)
class Load:
    """A way to load data that has fields."""

    count: int

    def __call__(self, folder: Path | None) -> Points:
        return Points(self.count, folder)


def smoothed() -> Task:
    """Return the task with a numeric argument of an average to tune."""
    averages = {"EMA": {"half_life": None, "smoothing": 0.4, "update_interval": "1ba"}}
    return tiny(arguments=averages, grids={"EMA": {"smoothing": Grid((0.4, 0.5), high=1.0)}})


fails = partial(tiny, network_that_fails)
reports_the_lock = partial(tiny, network_that_reports_the_lock)
dies_once = partial(tiny, network_that_dies)
always_dies = partial(tiny, network_that_always_dies)
