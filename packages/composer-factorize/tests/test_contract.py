"""The contract of all algorithms, for Factorize."""

from __future__ import annotations

from composer.algorithms.factorize import Factorize
from composer.testing import AlgorithmContract


class TestFactorize(AlgorithmContract):
    def make(self) -> Factorize:
        return Factorize(min_channels=4, min_features=4, latent_features=2)
