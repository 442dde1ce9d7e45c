from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, apply_blurpool
from composer.recipes import cifar10_record
from composer.recipes._networks import ConvNet, ResNet, SpeedNet
from composer.utils.module_surgery import count_module_instances


@pytest.mark.parametrize(
    ("kind", "channels", "size"),
    [(ResNet, 1, 4), (ResNet, 1, 28), (ResNet, 3, 33), (ConvNet, 1, 12), (ConvNet, 1, 28), (ConvNet, 3, 33)],
)
def test_images_of_any_size_become_class_scores(kind: Any, channels: int, size: int) -> None:
    network = kind(7, channels, width=4)

    assert (7, (2, 7)) == (network.num_classes, tuple(network(torch.randn(2, channels, size, size)).shape))


def test_the_later_stages_halve_the_resolution_and_double_the_channels() -> None:
    network = ResNet(10, 1, width=4, blocks=2)
    x = network.stem(torch.randn(1, 1, 16, 16))
    shapes = []
    for block in network.stages:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))

    assert [(4, 16, 16), (4, 16, 16), (8, 8, 8), (8, 8, 8), (16, 4, 4), (16, 4, 4)] == shapes


def test_a_new_block_is_its_shortcut() -> None:
    network = ResNet(10, 1, width=4)
    x = torch.rand(2, 4, 8, 8)

    assert torch.equal(x, network.stages[0](x))


def test_a_strided_shortcut_is_a_normalised_1x1_convolution() -> None:
    block = ResNet(10, 1, width=4).stages[1]
    x = torch.randn(2, 4, 8, 8)
    convolution, normalisation = block.shortcut

    expected = torch.relu(normalisation(convolution(x)))

    assert ((1, 1), (2, 2), None) == (convolution.kernel_size, convolution.stride, convolution.bias)
    assert torch.equal(expected, block(x))


def test_the_default_networks_have_something_for_blurpool() -> None:
    residual, plain = ResNet(10, 1), ConvNet(10, 1)
    apply_blurpool(residual)
    apply_blurpool(plain)

    assert 4 == count_module_instances(residual, BlurConv2d)
    assert 2 == count_module_instances(plain, BlurMaxPool2d)


def test_the_convolutions_of_the_plain_network_double_their_channels_and_two_poolings_follow() -> None:
    network = ConvNet(10, 3, width=4)
    convolutions = [layer for layer in network.features if isinstance(layer, nn.Conv2d)]
    shapes = []
    x = torch.randn(2, 3, 20, 20)
    for layer in network.features:
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            shapes.append((x.shape[1], x.shape[2]))

    assert [(3, 4), (4, 8), (8, 8), (8, 16), (16, 16)] == [
        (layer.in_channels, layer.out_channels) for layer in convolutions
    ]
    assert [(4, 20), (4, 10), (8, 10), (8, 10), (8, 5), (16, 5), (16, 5)] == shapes


def test_every_convolution_of_the_plain_network_is_normalised_and_rectified() -> None:
    kinds = [type(layer) for layer in ConvNet(10, 1).features if not isinstance(layer, nn.MaxPool2d)]

    assert 5 * [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] == kinds


@pytest.mark.parametrize(("grid", "size"), [(1, 4), (1, 28), (2, 12), (3, 12), (3, 27), (3, 28)])
def test_the_scores_are_a_linear_function_of_the_means_over_the_windows_of_a_grid(grid: int, size: int) -> None:
    network = ConvNet(10, 1, width=4, grid=grid).double().eval()
    x = torch.randn(2, 1, size, size, dtype=torch.float64)

    features = network.features(x)  # 1, 7, 3, 3, 6 and 7 positions, for which torch's windows are of one size, too
    means = nn.functional.adaptive_avg_pool2d(features, grid).flatten(1)

    torch.testing.assert_close(means @ network.classifier.weight.T + network.classifier.bias, network(x))


@pytest.mark.parametrize(("height", "width"), [(12, 20), (20, 33), (16, 44)])
def test_the_windows_of_a_grid_are_of_one_size_and_cover_the_image(height: int, width: int) -> None:
    network = ConvNet(10, 1, width=4).double().eval()
    x = torch.randn(1, 1, height, width, dtype=torch.float64)

    features = network.features(x)[0].requires_grad_()
    down, right = features.shape[1] // 3, features.shape[2] // 3
    tall, wide = features.shape[1] - 2 * down, features.shape[2] - 2 * right
    means = [
        channel[down * row : down * row + tall, right * column : right * column + wide].mean()
        for channel in features
        for row in range(3)
        for column in range(3)
    ]
    scores = network.classifier.weight @ torch.stack(means) + network.classifier.bias
    (gradient,) = torch.autograd.grad(torch.stack(means).sum(), features)

    torch.testing.assert_close(scores[None], network(x))
    assert bool((gradient > 0).all())


def test_an_image_too_small_for_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 12 pixels in each direction for a `grid` of 3"):
        ConvNet(10, 1)(torch.randn(2, 1, 28, 11))


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *((ResNet, argument) for argument in ("num_classes", "in_channels", "width", "blocks")),
        *((ConvNet, argument) for argument in ("num_classes", "in_channels", "width", "grid")),
    ],
)
def test_numbers_below_one_are_refused(kind: Any, argument: str) -> None:
    arguments: dict[str, Any] = {"num_classes": 10, "in_channels": 1, argument: 0}

    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        kind(**arguments)


def test_the_network_of_the_records_is_whitened_first_and_begins_with_identities() -> None:
    network = SpeedNet(10, 3, width=32)
    whitened, *others = (layer for layer in network.features if isinstance(layer, nn.Conv2d))
    norms = [layer for layer in network.features if isinstance(layer, nn.BatchNorm2d)]
    x = torch.randn(2, 24, 7, 7)

    assert ((2, 2), 24, 0.0) == (whitened.kernel_size, whitened.out_channels, float(whitened.bias.detach().abs().sum()))
    assert [(24, 32), (32, 32), (32, 128), (128, 128), (128, 128), (128, 128)] == [
        (layer.in_channels, layer.out_channels) for layer in others
    ]
    torch.testing.assert_close(others[0](x)[:, :24], x)
    assert [False] * 6 == [norm.weight.requires_grad for norm in norms]
    assert (10, (2, 10)) == (network.num_classes, tuple(network(torch.randn(2, 3, 32, 32)).shape))
    with pytest.raises(ValueError, match=r"`width` must be .* 1, got 0"):
        SpeedNet(10, 3, width=0)


def test_the_scores_of_the_records_are_divided_by_the_number_of_channels() -> None:
    network = SpeedNet(10, 3, width=4).eval()
    x = torch.randn(2, 3, 32, 32)
    largest = network.features(x).amax((2, 3))

    torch.testing.assert_close(largest @ network.classifier.weight.T / 16, network(x))
    assert pytest.approx(1.0) == float(network.classifier.weight.detach().std())


def test_the_optimizer_of_the_records_divides_the_decay_by_each_learning_rate() -> None:
    network = SpeedNet(10, 3, width=4)
    training = cifar10_record.Training(lr=2.0, head_lr=40.0, bias_lr=8.0, weight_decay=0.01)
    groups = {group["name"]: group for group in training.optimizer(network).param_groups}

    assert {
        "filters": (2.0, 0.005, 7),
        "head": (40.0, 0.00025, 1),
        "biases": (8.0, 0.00125, 6),
        "whitening_bias": (8.0, 0.00125, 1),
    } == {name: (group["lr"], group["weight_decay"], len(group["params"])) for name, group in groups.items()}
    assert [network.features[0].bias] == groups["whitening_bias"]["params"]
