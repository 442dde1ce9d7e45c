"""The contract of all algorithms, for __CLASS__."""

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.testing import AlgorithmContract


class Test__CLASS__(AlgorithmContract):
    def make(self) -> __CLASS__:
        return __CLASS__(strength=0.5)
