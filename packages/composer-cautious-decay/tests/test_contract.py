"""The contract of all algorithms, for CautiousDecay."""

from composer.algorithms.cautious_decay import CautiousDecay
from composer.testing import AlgorithmContract


class TestCautiousDecay(AlgorithmContract):
    def make(self) -> CautiousDecay:
        return CautiousDecay(weight_decay=2.0)
