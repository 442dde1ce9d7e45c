"""A small network of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from composer.testing import SimpleConvModel


def small_resnet() -> SimpleConvModel:
    """Three blocks of 8 channels, the last with a downsampling shortcut."""
    model = SimpleConvModel()
    down = nn.Sequential(nn.Conv2d(8, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
    blocks = [Bottleneck(8, 2), Bottleneck(8, 2), Bottleneck(8, 2, 2, down)]
    model.module.insert(1, nn.Sequential(nn.ReLU(), *blocks))
    return model


@pytest.fixture
def model() -> SimpleConvModel:
    torch.manual_seed(0)
    return small_resnet()
