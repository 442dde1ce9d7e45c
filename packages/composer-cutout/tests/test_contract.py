"""The contract of all algorithms, for CutOut."""

from __future__ import annotations

from composer.algorithms.cutout import CutOut
from composer.testing import AlgorithmContract


class TestCutOut(AlgorithmContract):
    def make(self) -> CutOut:
        return CutOut()


class TestCutOutOfManyUniformHoles(AlgorithmContract):
    def make(self) -> CutOut:
        return CutOut(num_holes=3, length=0.3, uniform_sampling=True)
