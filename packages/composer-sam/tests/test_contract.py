"""The contract of all algorithms, for SAM."""

from __future__ import annotations

from composer.algorithms.sam import SAM
from composer.testing import AlgorithmContract


class TestSAM(AlgorithmContract):
    def make(self) -> SAM:
        return SAM(rho=0.05)


class TestSAMInEverySecondStep(AlgorithmContract):
    def make(self) -> SAM:
        return SAM(rho=0.1, interval=2)
