"""The contract of all algorithms, for ScaleSchedule."""

from __future__ import annotations

from composer.algorithms.scale_schedule import ScaleSchedule
from composer.testing import AlgorithmContract


class TestScaleSchedule(AlgorithmContract):
    def make(self) -> ScaleSchedule:
        return ScaleSchedule(ratio=2.0)
