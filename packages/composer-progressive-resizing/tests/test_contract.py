"""The contract of all algorithms, for ProgressiveResizing."""

from __future__ import annotations

from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.testing import AlgorithmContract


class TestProgressiveResizing(AlgorithmContract):
    def make(self) -> ProgressiveResizing:
        return ProgressiveResizing(delay_fraction=0.2)


class TestProgressiveCropping(AlgorithmContract):
    """The corner is drawn before the batch is split, so microbatches equal one batch here too."""

    def make(self) -> ProgressiveResizing:
        return ProgressiveResizing("crop", delay_fraction=0.2)
