"""The contract of all algorithms, for EMANesterov."""

from __future__ import annotations

from composer.algorithms.ema_nesterov import EMANesterov
from composer.testing import AlgorithmContract


class TestEMANesterov(AlgorithmContract):
    def make(self) -> EMANesterov:
        return EMANesterov(beta=2.0, decay=0.9, begin="1ba", end="1dur")
