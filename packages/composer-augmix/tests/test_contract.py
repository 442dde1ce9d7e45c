"""The contract of all algorithms, for AugMix."""

from __future__ import annotations

from composer.algorithms.augmix import AugMix
from composer.testing import DatasetTransformContract


class TestAugMix(DatasetTransformContract):
    def make(self) -> AugMix:
        return AugMix(severity=5)
