"""The contract of all algorithms, for each kind of clipping."""

from __future__ import annotations

from composer.algorithms.gradient_clipping import GradientClipping
from composer.testing import AlgorithmContract


class TestClippingOfTheNorm(AlgorithmContract):
    def make(self) -> GradientClipping:
        return GradientClipping("norm", 0.1)


class TestClippingOfValues(AlgorithmContract):
    def make(self) -> GradientClipping:
        return GradientClipping("value", 0.01)


class TestAdaptiveClipping(AlgorithmContract):
    def make(self) -> GradientClipping:
        return GradientClipping("adaptive", 0.01, eps=1e-3)
