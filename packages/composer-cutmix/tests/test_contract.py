"""The contract of all algorithms, for CutMix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer.algorithms.cutmix import CutMix
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleSegmentationModel

REASON = "each microbatch draws its own box, so several microbatches do not equal one batch"


class TestCutMix(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> CutMix:
        return CutMix(alpha=1.0)


class TestCutMixOfLosses(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> CutMix:
        return CutMix(alpha=0.5, interpolate_loss=True, uniform_sampling=True)


class TestCutMixOfImages(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> CutMix:
        return CutMix(alpha=1.0)

    def make_model(self) -> ComposerModel:
        return SimpleSegmentationModel()

    def make_batches(self) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(7)
        return [
            (torch.randn(8, 3, 8, 6, generator=generator), torch.randint(0, 2, (8, 8, 6), generator=generator))
            for _ in range(4)
        ]
