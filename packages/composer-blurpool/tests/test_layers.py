"""The layers against torch's own and against the functions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from composer.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d

KERNELS = [(1, 1), (1, 3), (3, 3)]
SIZES = [(3, 3), (3, 7), (4, 4)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", SIZES)
class TestShapes:
    def test_pooling_has_the_shapes_of_torch(self, kernel: tuple[int, int], stride: int, size: tuple[int, int]) -> None:
        x = draw(2, 3, *size)

        assert nn.MaxPool2d(kernel, stride)(x).shape == BlurMaxPool2d(kernel, stride)(x).shape

    @pytest.mark.parametrize("blur_first", [False, True])
    def test_convolutions_have_the_shapes_of_torch(
        self, kernel: tuple[int, int], stride: int, size: tuple[int, int], blur_first: bool
    ) -> None:
        x = draw(2, 3, *size)
        expected = nn.Conv2d(3, 4, kernel, stride)(x)

        assert expected.shape == BlurConv2d(3, 4, kernel, stride, blur_first=blur_first)(x).shape


def test_pooling_is_the_function() -> None:
    x = draw(2, 3, 9, 9)
    options: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": True}

    assert torch.equal(blurmax_pool2d(x, **options), BlurMaxPool2d(**options)(x))
    assert torch.equal(blurmax_pool2d(x, 3, 3), BlurMaxPool2d(3)(x))


@pytest.mark.parametrize(
    ("kernel", "padding"), [(3, 1), (3, 0), ((1, 3), 0), (1, 0), (1, 1), ((1, 1), (0, 0)), (1, "valid"), (3, "valid")]
)
@pytest.mark.parametrize("stride", [2, (2, 1), 3])
def test_blur_first_is_a_blurred_input(kernel: Any, padding: Any, stride: Any) -> None:
    """Also where only those positions are blurred that a convolution of single positions reads."""
    torch.manual_seed(0)
    layer = BlurConv2d(4, 6, kernel, stride, padding)
    x = draw(2, 4, 9, 8)
    expected = nn.functional.conv2d(blur_2d(x), layer.conv.weight, layer.conv.bias, stride, padding)

    torch.testing.assert_close(expected, layer(x))


@pytest.mark.parametrize(("kernel", "padding", "seen"), [(1, 0, (4, 3)), (1, 1, (8, 6)), (3, 1, (8, 6))])
def test_a_convolution_of_single_positions_gets_only_those_it_keeps(
    kernel: int, padding: int, seen: tuple[int, int]
) -> None:
    layer = BlurConv2d(4, 4, kernel, 2, padding)
    sizes = []
    layer.conv.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[2:]))
    layer(draw(1, 4, 8, 6))

    assert [seen] == sizes


@pytest.mark.parametrize("stride", [2, (2, 1), None])
def test_blur_last_is_a_blurred_output(stride: Any) -> None:
    torch.manual_seed(0)
    layer = BlurConv2d(4, 6, 3, stride, 1, groups=2, bias=False, blur_first=False)
    x = draw(2, 4, 9, 8)
    expected = blur_2d(
        nn.functional.conv2d(x, layer.conv.weight, None, 1, 1, 1, 2), stride=3 if stride is None else stride
    )

    torch.testing.assert_close(expected, layer(x))


def test_blurring_is_a_layer() -> None:
    x = draw(2, 3, 9, 9)

    for channels in (0, 3):
        torch.testing.assert_close(blur_2d(x, stride=2), BlurPool2d(channels)(x))
        torch.testing.assert_close(blur_2d(x)[:, :, 1:-1:3, 1:-1:3], BlurPool2d(channels, stride=3, padding=0)(x))
    assert "BlurPool2d(channels=3, stride=(2, 2), padding=(1, 1))" == repr(BlurPool2d(3))


def test_one_image_is_a_batch_of_one() -> None:
    x = draw(1, 4, 8, 8)
    for layer in (BlurMaxPool2d(2), BlurConv2d(4, 4, 3, 2, 1), BlurPool2d()):
        torch.testing.assert_close(layer(x)[0], layer(x[0]))


def test_filters_are_buffers_that_move_with_the_layer() -> None:
    names = [list(dict(layer.named_buffers())) for layer in (BlurMaxPool2d(2), BlurConv2d(4, 6, 3, 2), BlurPool2d())]

    assert [["filt2d"], ["blur_filter"], ["blur_filter"]] == names
    assert (4, 1, 3, 3) == BlurConv2d(4, 6, 3, 2).blur_filter.shape
    assert (6, 1, 3, 3) == BlurConv2d(4, 6, 3, 2, blur_first=False).blur_filter.shape
    assert torch.bfloat16 is BlurMaxPool2d(2).to(torch.bfloat16).filt2d.dtype


def test_under_autocast_the_precision_is_that_of_a_convolution() -> None:
    x = draw(1, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (BlurMaxPool2d(2), BlurConv2d(4, 4, 3, 2, 1)):
            assert torch.bfloat16 is layer(x).dtype
            assert torch.bfloat16 is layer(x.bfloat16()).dtype


class TestFromMaxPool:
    def test_it_takes_over_all_options(self) -> None:
        layer = BlurMaxPool2d.from_maxpool2d(nn.MaxPool2d((2, 3), (2, 1), (1, 0), (1, 2), ceil_mode=True))

        expected = "kernel_size=(2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), ceil_mode=True"
        assert expected == layer.extra_repr()

    def test_it_keeps_the_stride_that_defaults_to_the_window(self) -> None:
        assert (3, 3) == BlurMaxPool2d.from_maxpool2d(nn.MaxPool2d(3)).stride

    def test_indices_cannot_be_blurred(self) -> None:
        with pytest.raises(ValueError, match=r"`module` must not return indices"):
            BlurMaxPool2d.from_maxpool2d(nn.MaxPool2d(2, return_indices=True))


class TestFromConv:
    @pytest.mark.parametrize("blur_first", [False, True])
    def test_it_holds_the_convolution_itself(self, blur_first: bool) -> None:
        conv = nn.Conv2d(4, 6, 3, 2, 1, groups=2)
        layer = BlurConv2d.from_conv2d(conv, blur_first=blur_first)

        assert conv is layer.conv
        assert conv.weight is layer.weight
        assert ["blur_filter", "conv.weight", "conv.bias"] == list(layer.state_dict())

    def test_a_constant_input_sees_the_convolution_alone(self) -> None:
        """Away from the edges a blur does not change it."""
        conv = nn.Conv2d(4, 6, 3, 2, 1)
        x = torch.ones(1, 4, 12, 12)
        for blur_first in (False, True):
            expected = conv(x)
            actual = BlurConv2d.from_conv2d(copy.deepcopy(conv), blur_first=blur_first)(x)
            torch.testing.assert_close(expected[..., 1:-1, 1:-1], actual[..., 1:-1, 1:-1])

    def test_the_border_is_treated_as_before(self) -> None:
        conv = nn.Conv2d(2, 2, 3, 2, 1, padding_mode="circular", bias=False)
        layer = BlurConv2d.from_conv2d(conv)
        x = draw(1, 2, 6, 6)

        torch.testing.assert_close(conv(blur_2d(x)), layer(x))
        assert layer.conv.bias is None

    def test_dtype_layout_and_frozen_weights_are_kept(self) -> None:
        conv = nn.Conv2d(4, 6, 3, 2).to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        conv.weight.requires_grad_(False)
        layer = BlurConv2d.from_conv2d(conv)

        assert {torch.bfloat16} == {tensor.dtype for tensor in layer.state_dict().values()}
        assert layer.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert [False, True] == [parameter.requires_grad for parameter in layer.conv.parameters()]

    def test_parametrizations_are_kept(self) -> None:
        conv: Any = spectral_norm(nn.Conv2d(4, 6, 3, 2)).eval()
        layer: Any = BlurConv2d.from_conv2d(conv).eval()

        assert torch.equal(conv.weight, layer.conv.weight)
        assert layer.conv.parametrizations.weight.original is conv.parametrizations.weight.original

    def test_subclasses_with_a_forward_of_their_own_are_refused_where_it_must_change(self) -> None:
        class Conv(nn.Conv2d):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input)

        class Pool(nn.MaxPool2d):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input)

        with pytest.raises(ValueError, match=r"`module` must not override `forward` if its output is blurred"):
            BlurConv2d.from_conv2d(Conv(4, 6, 3, 2), blur_first=False)
        with pytest.raises(ValueError, match=r"`module` must not override `forward`, got Pool"):
            BlurMaxPool2d.from_maxpool2d(Pool(2))

    def test_a_blur_of_the_input_needs_a_stride(self) -> None:
        with pytest.raises(ValueError, match=r"`stride` must be given with `blur_first`, got None"):
            BlurConv2d(4, 6, 3)


class Model(nn.Module):
    """All layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool = BlurMaxPool2d(3, 2, 1, ceil_mode=True)
        self.first, self.last = BlurConv2d(8, 8, 3, 2, 1), BlurConv2d(8, 8, 1, 2, blur_first=False)
        self.blur = BlurPool2d()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blur(self.last(self.first(self.pool(x))))  # type: ignore[no-any-return]


class TestExport:
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_torchscript_gives_the_same(self, requires_grad: bool) -> None:
        model, x = Model(), draw(2, 8, 33, 33).requires_grad_(requires_grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch calls TorchScript deprecated
            scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)  # type: ignore[no-untyped-call]

        torch.testing.assert_close(model(x), scripted(x))
        torch.testing.assert_close(model(x), traced(x))

    def test_torch_export_gives_the_same(self) -> None:
        model, x = Model(), draw(2, 8, 33, 33)

        torch.testing.assert_close(model(x), torch.export.export(model, (x,)).module()(x))

    def test_convolutions_can_be_traced_by_fx(self) -> None:
        model, x = nn.Sequential(BlurConv2d(8, 8, 3, 2)), draw(2, 8, 9, 9)

        torch.testing.assert_close(model(x), torch.fx.symbolic_trace(model)(x))
