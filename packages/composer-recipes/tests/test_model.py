from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.blurpool import BlurConv2d, apply_blurpool
from composer.recipes._model import ResNet
from composer.utils.module_surgery import count_module_instances


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_images_of_any_size_become_class_scores(channels: int, size: int) -> None:
    network = ResNet(7, channels, width=4)

    assert network(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_the_later_stages_halve_the_resolution_and_double_the_channels() -> None:
    network = ResNet(10, 1, width=4, blocks=2)
    x = network.stem(torch.randn(1, 1, 16, 16))
    shapes = []
    for block in network.stages:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))

    assert shapes == [(4, 16, 16), (4, 16, 16), (8, 8, 8), (8, 8, 8), (16, 4, 4), (16, 4, 4)]


def test_a_new_block_is_its_shortcut() -> None:
    network = ResNet(10, 1, width=4)
    x = torch.rand(2, 4, 8, 8)

    assert torch.equal(x, network.stages[0](x))


def test_the_default_network_has_strided_convolutions_for_blurpool() -> None:
    network = ResNet(10, 1)
    apply_blurpool(network)

    assert count_module_instances(network, BlurConv2d) == 4


@pytest.mark.parametrize("argument", ["num_classes", "in_channels", "width", "blocks"])
def test_numbers_below_one_are_refused(argument: str) -> None:
    arguments: dict[str, Any] = {"num_classes": 10, "in_channels": 1, argument: 0}

    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        ResNet(**arguments)
