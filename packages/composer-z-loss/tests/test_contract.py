"""The contract of all algorithms, for ZLoss."""

from __future__ import annotations

from typing import Any

import torch

from composer.algorithms.z_loss import ZLoss
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleTransformerModel


class TestZLoss(AlgorithmContract):
    def make(self) -> ZLoss:
        return ZLoss(coefficient=0.1)


class TestZLossOfLanguageModels(AlgorithmContract):
    def make(self) -> ZLoss:
        return ZLoss(coefficient=0.1)

    def make_model(self) -> ComposerModel:
        return SimpleTransformerModel(vocab_size=16)

    def make_batches(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(7)
        batches = []
        for _ in range(4):
            tokens = torch.randint(0, 16, (8, 6), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, -2:] = -100
            batches.append({"input_ids": tokens, "labels": labels})
        return batches
