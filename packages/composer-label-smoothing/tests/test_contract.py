"""The contract of all algorithms, for LabelSmoothing."""

from __future__ import annotations

from composer.algorithms.label_smoothing import LabelSmoothing
from composer.testing import AlgorithmContract


class TestLabelSmoothing(AlgorithmContract):
    def make(self) -> LabelSmoothing:
        return LabelSmoothing(smoothing=0.1)
