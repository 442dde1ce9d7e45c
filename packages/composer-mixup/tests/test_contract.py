"""The contract of all algorithms, for MixUp."""

from __future__ import annotations

from composer.algorithms.mixup import MixUp
from composer.testing import AlgorithmContract


class TestMixUp(AlgorithmContract):
    microbatch_reason = "each microbatch is mixed separately, so several microbatches do not equal one batch"

    def make(self) -> MixUp:
        return MixUp(alpha=0.2)


class TestMixUpOfLosses(AlgorithmContract):
    microbatch_reason = "each microbatch is mixed separately, so several microbatches do not equal one batch"

    def make(self) -> MixUp:
        return MixUp(alpha=1.0, interpolate_loss=True)
