"""The contract of all algorithms, for ScheduleFree."""

from __future__ import annotations

from composer.algorithms.schedule_free import ScheduleFree
from composer.testing import AlgorithmContract


class TestScheduleFree(AlgorithmContract):
    def make(self) -> ScheduleFree:
        return ScheduleFree()


class TestScheduleFreeWithOptions(AlgorithmContract):
    def make(self) -> ScheduleFree:
        return ScheduleFree(warmup="2ba", lr=0.5, weight_decay=0.1, momentum=0.8, r=1.0, weight_lr_power=1.0)
