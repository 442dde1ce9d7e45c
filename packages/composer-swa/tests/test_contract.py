"""The contract of all algorithms, for SWA with and without a schedule."""

from __future__ import annotations

from composer.algorithms.swa import SWA
from composer.testing import AlgorithmContract


class TestSWA(AlgorithmContract):
    def make(self) -> SWA:
        return SWA(swa_start="0.25dur", swa_end="0.75dur", update_interval="1ba")


class TestScheduledSWA(AlgorithmContract):
    def make(self) -> SWA:
        return SWA(
            swa_start="0.25dur",
            swa_end="0.99dur",
            update_interval="1ba",
            schedule_swa_lr=True,
            anneal_strategy="cos",
            anneal_steps=3,
            swa_lr=0.2,
        )
