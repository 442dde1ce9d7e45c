"""`apply_channels_last` and `ChannelsLast` on models, with the engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.channels_last import ChannelsLast, apply_channels_last
from composer.algorithms.warnings import NoEffectWarning
from composer.core import REPLACES_CONVS, WRAPS_CONVS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import ConvModel, SimpleModel

LAST = torch.channels_last


def nhwc(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a tensor that is stored image by image, row by row, pixel by pixel, channel by channel."""
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c)


def start(model: nn.Module, *algorithms: Algorithm) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithms)
    Engine(state).run_event("init")
    return state


def test_the_function_is_registered() -> None:
    assert apply_channels_last is cf.apply_channels_last


@pytest.mark.parametrize("by_class", [False, True])
def test_weights_change_their_strides_and_nothing_else(by_class: bool) -> None:
    before, model = ConvModel(), ConvModel()
    parameters = list(model.parameters())
    if by_class:
        start(model, ChannelsLast())
    else:
        apply_channels_last(model)

    assert (288, 9, 3, 1) == before.conv1.weight.stride()
    assert nhwc(model.conv1.weight.shape) == model.conv1.weight.stride()
    for old, kept, new in zip(before.parameters(), parameters, model.parameters(), strict=True):
        assert kept is new
        assert torch.equal(old, new)


def test_outputs_and_gradients_stay() -> None:
    before, model, x = ConvModel(), ConvModel(), torch.randn(4, 32, 16, 16)
    apply_channels_last(model)
    for each in (before, model):
        each((x, None)).square().sum().backward()

    torch.testing.assert_close(before((x, None)), model((x, None)))
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(old.grad, new.grad, rtol=1e-4, atol=1e-4)


def test_feature_maps_follow_the_weights() -> None:
    """The layout of the images does not matter."""
    model = ConvModel()
    apply_channels_last(model)
    features = model.conv2(model.conv1(torch.randn(2, 32, 16, 16)))

    assert nhwc(features.shape) == features.stride()


def test_a_model_without_four_dimensional_weights_stays_as_it_is() -> None:
    before, model = SimpleModel(), SimpleModel()
    with pytest.warns(
        NoEffectWarning, match="`apply_channels_last` changed nothing: the model has no parameter"
    ) as caught:
        apply_channels_last(model)

    assert caught[0].filename == __file__
    assert [p.stride() for p in before.parameters()] == [p.stride() for p in model.parameters()]


def test_checkpoints_load_into_either_layout() -> None:
    """And the layout of the model stays."""
    model, other = ConvModel(seed=1), ConvModel(seed=2)
    apply_channels_last(model)
    expected = {name: tensor.contiguous().clone() for name, tensor in other.state_dict().items()}
    model.load_state_dict(expected)

    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    assert nhwc(model.conv1.weight.shape) == model.conv1.weight.stride()
    other.load_state_dict(model.state_dict())
    assert other.conv1.weight.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_the_gpu_change_their_strides() -> None:
    model = ConvModel().cuda()
    start(model, ChannelsLast())

    assert nhwc(model.conv1.weight.shape) == model.conv1.weight.stride()


class BringsConvs(Algorithm):
    """A method that puts new convolutions into the model."""

    events = frozenset({Event.INIT})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.conv1 = nn.Conv2d(32, 8, 3)


@pytest.mark.parametrize("effect", [REPLACES_CONVS, WRAPS_CONVS])
@pytest.mark.parametrize("reverse", [False, True])
def test_new_convolutions_are_stored_channels_last_in_any_order_of_the_list(effect: str, reverse: bool) -> None:
    model, algorithms = ConvModel(), [BringsConvs(effect), ChannelsLast()]
    start(model, *(reversed(algorithms) if reverse else algorithms))

    assert nhwc(model.conv1.weight.shape) == model.conv1.weight.stride()


def test_each_weight_gets_the_format_of_its_number_of_dimensions() -> None:
    model = nn.ModuleList([nn.Conv1d(2, 4, 3), nn.Conv2d(2, 4, 3), nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)])
    inputs = [torch.randn(2, 2, 5), torch.randn(2, 2, 5, 5), torch.randn(2, 2, 5, 5, 5)]
    expected = [conv(x) for conv, x in zip(model, inputs, strict=False)]
    parameters = list(model.parameters())
    apply_channels_last(model)

    assert model[0].weight.is_contiguous()
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for conv, x, output in zip(model, inputs, expected, strict=False):
        torch.testing.assert_close(output, conv(x))
    assert model[2](inputs[2]).is_contiguous(memory_format=torch.channels_last_3d)


def test_lazy_layers_stay_with_a_warning() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 3))
    with pytest.warns(UserWarning, match=r"`0` \(LazyConv2d\): its shape is not known yet"):
        apply_channels_last(model)

    assert nhwc(model[1].weight.shape) == model[1].weight.stride()
    assert (1, 4, 1, 1) == model(torch.randn(1, 2, 5, 5)).shape


# Torch's own error, without this package.
_NARROW = """
import torch

torch.set_num_threads(1)
layer = torch.nn.Conv2d(4, 8, 1, stride=2).to(memory_format=torch.channels_last)
for _ in range(20):
    images = torch.randn(16, 4, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    layer(images).sum().backward()
"""


@pytest.mark.xfail(strict=False, reason="torch 2.14.1 writes beyond its memory; remove the warning once this passes")
def test_torch_trains_narrow_strided_convolutions_in_this_layout() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "MALLOC_CHECK_": "3"}

    subprocess.run([sys.executable, "-c", _NARROW], env=environment, capture_output=True, timeout=300, check=True)


@pytest.mark.parametrize("channels", [1, 7])
def test_a_layer_that_torch_cannot_train_in_this_layout_warns(channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 8, 1, stride=2))

    with pytest.warns(
        UserWarning, match=rf"`1` \(Conv2d\({channels}, 8, .* wider, or leave `ChannelsLast` out"
    ) as caught:
        apply_channels_last(model)

    assert __file__ == caught[0].filename


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, stride=2), nn.LazyConv2d(8, 1, stride=2)],
)
def test_layers_that_torch_can_train_do_not_warn(layer: nn.Module) -> None:
    if isinstance(layer, nn.LazyConv2d):
        layer(torch.zeros(1, 8, 4, 4))
    apply_channels_last(layer)
