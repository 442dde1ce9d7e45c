"""The contract of all algorithms, for StochasticDepth."""

from __future__ import annotations

from torch import nn
from torchvision.models.resnet import Bottleneck

from composer.algorithms.stochastic_depth import StochasticDepth
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel

REASON = "Each microbatch draws separately, so microbatches do not equal one batch."


class Model(SimpleConvModel):
    """Has two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.module.insert(1, nn.Sequential(nn.ReLU(), Bottleneck(8, 2), Bottleneck(8, 2)))


class TestBlocks(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> StochasticDepth:
        return StochasticDepth("ResNetBottleneck", drop_rate=0.6)

    def make_model(self) -> ComposerModel:
        return Model()


class TestSamples(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> StochasticDepth:
        return StochasticDepth("ResNetBottleneck", "sample", drop_rate=0.6)

    def make_model(self) -> ComposerModel:
        return Model()


class TestWarmup(AlgorithmContract):
    microbatch_reason = REASON

    def make(self) -> StochasticDepth:
        return StochasticDepth("ResNetBottleneck", drop_rate=0.9, drop_distribution="uniform", drop_warmup="3ba")

    def make_model(self) -> ComposerModel:
        return Model()
