"""The contract of all algorithms, for __CLASS__."""

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.testing import AlgorithmContract


class Test__CLASS__(AlgorithmContract):
    microbatch_reason = "each draws its own examples, so several microbatches do not equal one batch"

    def make(self) -> __CLASS__:
        return __CLASS__(probability=0.5)
