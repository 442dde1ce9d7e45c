"""Models and helpers of the export tests."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.testing import SimpleConvModel

EPS = torch.finfo(torch.float32).eps
SMALL = (torch.zeros(2, 1, 2, 2), torch.zeros(2))


def conv_batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, 16, 16, generator=generator), torch.zeros(rows, dtype=torch.int64)


def text_batch(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 32, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def trained_conv() -> SimpleConvModel:
    """A model in training, whose batch norm has seen data, with gradients."""
    model = SimpleConvModel(norm="batch").train()
    model.loss(model(conv_batch(8)), conv_batch(8)).backward()  # type: ignore[no-untyped-call]
    return model


def expected(model: torch.nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(batch)


def assert_same(found: torch.Tensor, wanted: torch.Tensor, depth: int) -> None:
    """Equal up to the rounding of sums of at most `depth` products, which may be added in another order.

    The error of such a sum grows with the square root of its length, relative to its largest terms, which are of the
    order of one here. Eight layers follow one another at most.
    """
    bound = 8 * math.sqrt(depth) * EPS * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


def loaded(path: Path) -> torch.nn.Module:
    return torch.export.load(path).module()


class Multiply(torch.nn.Module):
    """No `ComposerModel`: it takes what it multiplies as arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return x * y if scale is None else x * y * scale


def widen(model: torch.nn.Module) -> None:
    """Surgery: a layer that was not there before."""
    model.module[-2] = torch.nn.Sequential(model.module[-2], torch.nn.Linear(16, 16))


class Widen(Algorithm):
    """The same as an algorithm."""

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        widen(state.model)
