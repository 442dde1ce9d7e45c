"""The contract of all algorithms, for SAM."""

from __future__ import annotations

from composer.algorithms.sam import SAM
from composer.testing import AlgorithmContract


class TestSAM(AlgorithmContract):
    """With steps of one pass and of two."""

    def make(self) -> SAM:
        return SAM(rho=0.1, interval=2)
