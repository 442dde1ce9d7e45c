"""The contract of all algorithms, for RandAugment."""

from __future__ import annotations

from composer.algorithms.randaugment import RandAugment
from composer.testing import DatasetTransformContract


class TestRandAugment(DatasetTransformContract):
    def make(self) -> RandAugment:
        return RandAugment(severity=5)
