"""The contract of all algorithms, for GyroDropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer.algorithms.gyro_dropout import GyroDropout
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleModelWithDropout

REASON = "Each microbatch is divided among all selected masks, so microbatches do not equal one batch."


class TestGyroDropout(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> GyroDropout:
        return GyroDropout(sigma=8, tau=4)

    def make_model(self) -> ComposerModel:
        return SimpleModelWithDropout(num_features=6)

    def make_batches(self) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(7)
        return [
            (torch.randn(8, 6, generator=generator), torch.randint(0, 10, (8,), generator=generator)) for _ in range(4)
        ]


class TestFewRows(TestGyroDropout):
    """Each batch uses consecutive masks from a random start."""

    microbatch_reason = REASON

    def make(self) -> GyroDropout:
        return GyroDropout(p=0.3, sigma=32, tau=16)
