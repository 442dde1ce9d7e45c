"""The contract of all algorithms, for WeightStandardization."""

from __future__ import annotations

from composer.algorithms.weight_standardization import WeightStandardization
from composer.testing import AlgorithmContract


class TestWeightStandardization(AlgorithmContract):
    def make(self) -> WeightStandardization:
        return WeightStandardization()


class TestWeightStandardizationOfTheFirst(AlgorithmContract):
    def make(self) -> WeightStandardization:
        return WeightStandardization(n_last_layers_ignore=1)
