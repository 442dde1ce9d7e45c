"""Tasks that train in a moment. Processes of runs import this module."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer.datasets.device_loader import DeviceLoader
from composer.evidence import Grid, Task, Variant
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


dies_once = partial(tiny, network_that_dies)
always_dies = partial(tiny, network_that_always_dies)
