"""The contract of all algorithms, for Distillation."""

from composer.algorithms.distillation import Distillation
from composer.testing import AlgorithmContract, SimpleConvModel


class TestDistillation(AlgorithmContract):
    def make(self) -> Distillation:
        return Distillation(SimpleConvModel(seed=5))
