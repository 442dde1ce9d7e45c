"""The layers against plain arithmetic."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer.algorithms.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def slow_squeeze_excite(image: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """One image, one channel at a time."""
    z = [float(channel.sum()) / channel.numel() for channel in image]
    hidden = [max(sum(w * m for w, m in zip(row.tolist(), z, strict=True)), 0.0) for row in w1]
    scores = [sum(w * h for w, h in zip(row.tolist(), hidden, strict=True)) for row in w2]
    weights = [1 / (1 + math.exp(-score)) for score in scores]
    return torch.stack([weight * channel for weight, channel in zip(weights, image, strict=True)])


def weights_of(layer: SqueezeExcite2d) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (m for m in layer.pool_and_mlp if isinstance(m, nn.Linear))
    assert first.bias is None
    assert second.bias is None
    return first.weight.detach(), second.weight.detach()


@settings(deadline=None, max_examples=40)
@given(
    channels=st.integers(1, 9),
    latent=st.one_of(st.integers(1, 5), st.floats(0.05, 0.95)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_it_is_a_loop_over_channels(channels: int, latent: float, size: tuple[int, int]) -> None:
    layer, x = SqueezeExcite2d(channels, latent), draw(3, channels, *size)
    before = x.clone()
    expected = torch.stack([slow_squeeze_excite(image, *weights_of(layer)) for image in x])

    torch.testing.assert_close(expected, layer(x))
    torch.testing.assert_close(expected[0], layer(x[0]))
    assert torch.equal(before, x)


@pytest.mark.parametrize(("latent", "width"), [(0.125, 4), (0.5, 16), (0.99, 31), (1, 1), (7, 7), (64, 64), (0.01, 1)])
def test_the_latent_width_is_a_number_or_a_fraction_of_at_least_one_channel(latent: float, width: int) -> None:
    w1, w2 = weights_of(SqueezeExcite2d(32, latent))

    assert (width, 32) == w1.shape
    assert (32, width) == w2.shape


def test_the_output_of_a_convolution_is_weighted() -> None:
    layer = SqueezeExciteConv2d(4, 8, 3, 2, padding=1, groups=2, bias=False, latent_channels=3)
    x = draw(2, 4, 8, 8)

    assert {"conv.weight", "se.pool_and_mlp.2.weight", "se.pool_and_mlp.4.weight"} == set(layer.state_dict())
    assert (2, 8, 4, 4) == layer(x).shape
    torch.testing.assert_close(layer.se(layer.conv(x)), layer(x))
    torch.testing.assert_close(layer(x)[0], layer(x[0]))


def test_a_convolution_is_wrapped_not_copied() -> None:
    conv = nn.Conv2d(4, 6, 3)
    layer = SqueezeExciteConv2d.from_conv2d(conv, latent_channels=2)

    assert layer.conv is conv
    assert (2, 6) == weights_of(layer.se)[0].shape
    assert SqueezeExciteConv2d(conv=conv).conv is conv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_devices_and_memory_formats_are_those_of_the_convolution(dtype: torch.dtype) -> None:
    layer = SqueezeExciteConv2d.from_conv2d(nn.Conv2d(4, 6, 3, dtype=dtype))
    output = layer(draw(2, 4, 8, 8).to(dtype, memory_format=torch.channels_last))

    assert dtype is output.dtype
    assert output.is_contiguous(memory_format=torch.channels_last)
    meta = SqueezeExciteConv2d.from_conv2d(nn.Conv2d(4, 6, 3, device="meta"))
    assert {"meta"} == {p.device.type for p in meta.parameters()}


@pytest.mark.parametrize("latent_channels", [0, -0.5])
def test_a_latent_width_that_is_not_positive_is_refused(latent_channels: float) -> None:
    with pytest.raises(ValueError, match=r"`latent_channels` must be positive, got"):
        SqueezeExcite2d(16, latent_channels)
    with pytest.raises(ValueError, match=r"`latent_channels` must be positive, got"):
        SqueezeExciteConv2d(3, 16, 3, latent_channels=latent_channels)


class TestExport:
    def make(self) -> tuple[Any, torch.Tensor]:
        return nn.Sequential(SqueezeExciteConv2d(3, 8, 3)), draw(2, 3, 6, 6)

    def test_torchscript_gives_the_same(self) -> None:
        model, x = self.make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch calls TorchScript deprecated
            scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)  # type: ignore[no-untyped-call]

        torch.testing.assert_close(model(x), scripted(x))
        torch.testing.assert_close(model(x), traced(x))

    def test_captured_graphs_give_the_same(self) -> None:
        model, x = self.make()

        torch.testing.assert_close(model(x), torch.fx.symbolic_trace(model)(x))
        torch.testing.assert_close(model(x), torch.export.export(model, (x,)).module()(x))
        torch.testing.assert_close(model(x), torch.compile(model, backend="eager", fullgraph=True)(x))
