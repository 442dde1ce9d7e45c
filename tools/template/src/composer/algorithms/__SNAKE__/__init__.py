"""__CLASS__: train on inputs with Gaussian noise."""

from composer.algorithms.__SNAKE__.__SNAKE__ import __CLASS__ as __CLASS__
from composer.algorithms.__SNAKE__.__SNAKE__ import __SNAKE___batch as __SNAKE___batch

__all__ = ["__CLASS__", "__SNAKE___batch"]
