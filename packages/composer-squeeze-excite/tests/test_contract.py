"""The contract of all algorithms, for SqueezeExcite."""

from __future__ import annotations

from composer.algorithms.squeeze_excite import SqueezeExcite
from composer.testing import AlgorithmContract


class TestSqueezeExcite(AlgorithmContract):
    def make(self) -> SqueezeExcite:
        return SqueezeExcite(latent_channels=4, min_channels=3)


class TestSqueezeExciteOfAFraction(AlgorithmContract):
    def make(self) -> SqueezeExcite:
        return SqueezeExcite(latent_channels=0.5, min_channels=4)
