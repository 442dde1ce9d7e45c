"""The contract of all algorithms, for TestTimeAugmentation."""

from __future__ import annotations

from composer.algorithms.test_time_augmentation import TestTimeAugmentation
from composer.testing import AlgorithmContract


class TestTTA(AlgorithmContract):
    def make(self) -> TestTimeAugmentation:
        return TestTimeAugmentation(level=2)
