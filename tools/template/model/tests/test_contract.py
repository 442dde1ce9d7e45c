"""The contract of all algorithms, for __CLASS__."""

from torch import nn

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.testing import AlgorithmContract, SimpleConvModel


class Test__CLASS__(AlgorithmContract):
    def make(self) -> __CLASS__:
        return __CLASS__(slope=0.1)

    def make_model(self) -> SimpleConvModel:
        model = SimpleConvModel()
        model.module.insert(1, nn.ReLU())
        return model
