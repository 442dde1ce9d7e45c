"""The contract of all algorithms, for BlurPool."""

from __future__ import annotations

from composer.algorithms.blurpool import BlurPool
from composer.testing import AlgorithmContract


class TestBlurPool(AlgorithmContract):
    def make(self) -> BlurPool:
        return BlurPool(min_channels=0)


class TestBlurPoolOfOutputs(AlgorithmContract):
    def make(self) -> BlurPool:
        return BlurPool(blur_first=False, min_channels=0)
