"""The contract of all algorithms, for SelectiveBackprop."""

from __future__ import annotations

from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.testing import AlgorithmContract, SimpleConvModel


class TestSelectiveBackprop(AlgorithmContract):
    def make(self) -> SelectiveBackprop:
        return SelectiveBackprop(start=0.2, end=1.0, interrupt=0)

    def make_model(self) -> SimpleConvModel:
        return SimpleConvModel()
