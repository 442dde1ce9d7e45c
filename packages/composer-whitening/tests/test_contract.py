"""The contract of all algorithms, for Whitening."""

from __future__ import annotations

import torch

from composer.algorithms.whitening import Whitening
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel


class TestWhitening(AlgorithmContract):
    has_bias = True

    def make(self) -> Whitening:
        return Whitening(num_images=20, bias_duration="3ba")

    def make_model(self) -> ComposerModel:
        model = SimpleConvModel()
        model.conv1 = torch.nn.Conv2d(3, 24, kernel_size=2, stride=2, bias=self.has_bias)
        model.conv2 = torch.nn.Conv2d(24, 4, kernel_size=3)
        model.module[0], model.module[1] = model.conv1, model.conv2
        return model


class TestWhiteningWithANewBias(TestWhitening):
    has_bias = False
