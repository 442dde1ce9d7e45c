"""The contract of all algorithms, for LowPrecisionGroupNorm, under autocast."""

from __future__ import annotations

from typing import Any

import torch

from composer.algorithms.low_precision_groupnorm import LowPrecisionGroupNorm
from composer.core import Algorithm, State
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel


class Model(SimpleConvModel):
    """Computes under autocast, which leaves float64 alone."""

    def __init__(self) -> None:
        super().__init__(norm="group")

    def forward(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=batch[0].dtype is torch.float32):
            return super().forward(batch)


class TestLowPrecisionGroupNorm(AlgorithmContract):
    def make(self) -> LowPrecisionGroupNorm:
        return LowPrecisionGroupNorm()

    def make_model(self) -> ComposerModel:
        return Model()

    def _state(self, algorithm: Algorithm, dtype: torch.dtype, device: str = "cpu") -> State:
        state = super()._state(algorithm, dtype, device)
        state.precision = "amp_bf16"
        return state
