"""The contract of all algorithms, for EMA."""

from __future__ import annotations

from composer.algorithms.ema import EMA
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel


class TestEMA(AlgorithmContract):
    def make(self) -> EMA:
        return EMA(half_life="2ba")

    def make_model(self) -> ComposerModel:
        return SimpleConvModel(norm="group")
