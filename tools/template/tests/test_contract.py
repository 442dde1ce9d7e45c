"""What every algorithm must do."""

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.testing import AlgorithmContract


class Test__CLASS__(AlgorithmContract):
    microbatch_reason = "each draws its own noise, so several microbatches do not equal one batch"

    def make(self) -> __CLASS__:
        return __CLASS__(strength=0.1)
