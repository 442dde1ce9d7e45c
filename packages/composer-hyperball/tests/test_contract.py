"""The contract of all algorithms, for Hyperball."""

from composer.algorithms.hyperball import Hyperball
from composer.testing import AlgorithmContract


class TestHyperball(AlgorithmContract):
    def make(self) -> Hyperball:
        return Hyperball(lr=0.02)
