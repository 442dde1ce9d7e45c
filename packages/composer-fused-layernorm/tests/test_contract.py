"""The contract of all algorithms, for FusedLayerNorm, under autocast."""

from __future__ import annotations

from typing import Any

import torch

from composer.algorithms.fused_layernorm import FusedLayerNorm
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel


class Model(SimpleConvModel):
    """Computes under autocast, which leaves float64 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.module[4] = torch.nn.Sequential(torch.nn.LayerNorm(4), self.module[4])

    def forward(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=batch[0].dtype is torch.float32):
            return super().forward(batch)


class TestFusedLayerNorm(AlgorithmContract):
    def make(self) -> FusedLayerNorm:
        return FusedLayerNorm()

    def make_model(self) -> ComposerModel:
        return Model()
