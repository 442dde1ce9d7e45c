"""The contract of all algorithms, for LAWA and PostHocEMA."""

from __future__ import annotations

from composer.algorithms.lawa import LAWA, PostHocEMA
from composer.testing import AlgorithmContract


class TestLAWA(AlgorithmContract):
    def make(self) -> LAWA:
        return LAWA(num_snapshots=2, interval="1ba")


class TestPostHocEMA(AlgorithmContract):
    def make(self) -> PostHocEMA:
        return PostHocEMA(snapshot_interval="2ba")
