"""`blur_2d` and `blurmax_pool2d` against loops over pixels and torch's operators."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer.algorithms.blurpool import blur_2d, blurmax_pool2d, blurpool_layers

SIZES = [(3, 3), (3, 7), (4, 4), (1, 5)]
LINE = [1, 2, 1]


def draw(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), **options)


def slow_blur(image: torch.Tensor, stride: int) -> torch.Tensor:
    """One channel of one image, one pixel at a time."""
    height, width = image.shape
    rows: list[list[float]] = []
    for i in range(0, height, stride):
        rows.append([])
        for j in range(0, width, stride):
            total = 0.0
            for di, dj in itertools.product((-1, 0, 1), repeat=2):
                if 0 <= i + di < height and 0 <= j + dj < width:
                    total += LINE[di + 1] * LINE[dj + 1] / 16 * float(image[i + di, j + dj])
            rows[-1].append(total)
    return torch.tensor(rows, dtype=image.dtype)


def slow_blurmax(x: torch.Tensor, kernel: int, stride: int, padding: int, dilation: int = 1) -> torch.Tensor:
    """The plain definition: pool every position, surround with zeros, blur every position, keep some."""
    pooled = F.pad(F.max_pool2d(x, kernel, 1, padding, dilation), (1, 1, 1, 1))
    line = torch.tensor(LINE, dtype=x.dtype) / 4
    blurred = F.conv2d(pooled, torch.outer(line, line).expand(x.shape[1], 1, 3, 3), groups=x.shape[1])
    return blurred[:, :, ::stride, ::stride]


class TestBlur:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("stride", [1, 2, 3])
    def test_it_is_a_loop_over_pixels(self, size: tuple[int, int], stride: int) -> None:
        x = draw(2, 3, *size)
        expected = torch.stack([torch.stack([slow_blur(channel, stride) for channel in image]) for image in x])

        torch.testing.assert_close(expected, blur_2d(x, stride=stride))
        torch.testing.assert_close(expected, blur_2d(x, channels=3, stride=(stride, stride)))
        torch.testing.assert_close(expected[0], blur_2d(x[0], stride=stride))

    def test_the_filter_is_the_binomial_one(self) -> None:
        expected = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16

        assert torch.equal(expected[None, None], blurpool_layers._default_2d_filter())

    def test_flat_areas_stay_and_edges_fade_into_the_zeros_around(self) -> None:
        blurred = blur_2d(torch.ones(1, 1, 4, 4))[0, 0]

        assert torch.equal(torch.ones(2, 2), blurred[1:3, 1:3])
        assert [0.5625, 0.75, 0.75, 0.5625] == blurred[0].tolist()

    @settings(deadline=None)
    @given(size=st.tuples(st.integers(1, 9), st.integers(1, 9)), stride=st.integers(1, 4))
    def test_every_strideth_position_is_computed(self, size: tuple[int, int], stride: int) -> None:
        x = draw(1, 2, *size)
        blurred = blur_2d(x, stride=stride)

        assert tuple(math.ceil(n / stride) for n in size) == blurred.shape[2:]
        torch.testing.assert_close(blur_2d(x)[:, :, ::stride, ::stride], blurred)

    @settings(deadline=None)
    @given(seed=st.integers(0, 100), size=st.tuples(st.integers(3, 9), st.integers(3, 9)))
    def test_it_does_not_raise_the_deviation(self, seed: int, size: tuple[int, int]) -> None:
        x = torch.randn(1, 1, *size, generator=torch.Generator().manual_seed(seed))

        assert blur_2d(x).std() <= x.std()

    def test_the_stride_may_differ_by_side(self) -> None:
        x = draw(1, 2, 6, 6)

        torch.testing.assert_close(blur_2d(x)[:, :, ::2], blur_2d(x, stride=(2, 1)))

    def test_a_given_filter_is_used(self) -> None:
        x, filter = draw(2, 3, 8, 8), draw(3, 1, 5, 3)
        expected = F.conv2d(x, filter, padding=(2, 1), groups=3)

        torch.testing.assert_close(expected, blur_2d(x, filter=filter))
        torch.testing.assert_close(expected, blur_2d(x, channels=3, filter=filter))
        torch.testing.assert_close(blur_2d(x, filter=filter[:1].repeat(3, 1, 1, 1)), blur_2d(x, filter=filter[:1]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_the_dtype_is_that_of_the_input_whatever_the_filter(self, dtype: torch.dtype) -> None:
        x = draw(1, 2, 6, 6, dtype=dtype)

        assert dtype is blur_2d(x).dtype
        assert dtype is blur_2d(x, filter=torch.ones(1, 1, 3, 3)).dtype
        assert dtype is blurmax_pool2d(x).dtype

    def test_the_filter_is_made_on_the_device_of_the_input(self) -> None:
        x = torch.zeros(1, 2, 6, 6, device="meta")

        assert "meta" == blurpool_layers._default_2d_filter(device=x.device).device.type
        assert "meta" == blur_2d(x).device.type
        assert "meta" == blurmax_pool2d(x).device.type

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_the_gpu_gives_the_same_without_waiting(self) -> None:
        x = draw(2, 16, 9, 9)
        on_device = x.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = blur_2d(on_device, stride=2), blurmax_pool2d(on_device, 3, 2, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

        torch.testing.assert_close(blur_2d(x, stride=2), actual[0].cpu())
        torch.testing.assert_close(blurmax_pool2d(x, 3, 2, 1), actual[1].cpu())

    def test_filters_must_have_a_middle_and_four_dimensions(self) -> None:
        for function in (blur_2d, blurmax_pool2d):
            with pytest.raises(IndexError, match=r"`filter` must have odd sides, got 2 by 3"):
                function(torch.zeros(1, 1, 4, 4), filter=torch.zeros(1, 1, 2, 3))
            with pytest.raises(ValueError, match=r"`filter` must have four dimensions, got shape \(3, 3\)"):
                function(torch.zeros(1, 1, 4, 4), filter=torch.zeros(3, 3))


class TestBlurmax:
    @pytest.mark.parametrize("channels", [1, 3, 16])
    @pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (1, 2, 0), (4, 3, 2)])
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_it_is_the_plain_definition(
        self, channels: int, kernel: int, stride: int, padding: int, layout: torch.memory_format, requires_grad: bool
    ) -> None:
        x = draw(2, channels, 7, 6).round().to(memory_format=layout)  # with many equal maxima
        x.requires_grad_(requires_grad)
        expected = slow_blurmax(x, kernel, stride, padding)
        actual = blurmax_pool2d(x, kernel, stride, padding)

        torch.testing.assert_close(expected, actual)
        assert actual.is_contiguous(memory_format=layout)
        if requires_grad:
            g = draw(*expected.shape)
            torch.testing.assert_close(torch.autograd.grad(expected, x, g), torch.autograd.grad(actual, x, g))

    def test_the_default_window_is_two_by_two(self) -> None:
        x = draw(1, 2, 6, 6)

        torch.testing.assert_close(slow_blurmax(x, 2, 2, 0), blurmax_pool2d(x))

    def test_one_image_is_a_batch_of_one(self) -> None:
        for requires_grad in (False, True):
            x = draw(1, 16, 9, 8, requires_grad=requires_grad)

            torch.testing.assert_close(blurmax_pool2d(x, 3, 2, 1)[0], blurmax_pool2d(x[0], 3, 2, 1))

    def test_sides_may_differ(self) -> None:
        x = draw(1, 9, 8, 9)
        pooled = F.max_pool2d(x, (2, 3), 1, (0, 1), (2, 1))

        for input in (x, x.clone().requires_grad_()):
            actual = blurmax_pool2d(input, (2, 3), (1, 2), (0, 1), (2, 1))
            torch.testing.assert_close(blur_2d(pooled, stride=(1, 2)), actual)

    @settings(deadline=None)
    @given(
        size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
        kernel=st.integers(1, 4),
        stride=st.integers(1, 4),
        padding=st.integers(0, 2),
        dilation=st.integers(1, 2),
        ceil_mode=st.booleans(),
        requires_grad=st.booleans(),
    )
    def test_shapes_are_those_of_torch(
        self,
        size: tuple[int, int],
        kernel: int,
        stride: int,
        padding: int,
        dilation: int,
        ceil_mode: bool,
        requires_grad: bool,
    ) -> None:
        window = dilation * (kernel - 1) + 1
        assume(padding <= kernel // 2 and window <= min(size) + 2 * padding)
        x = draw(1, 8, *size, requires_grad=requires_grad)
        actual = blurmax_pool2d(x, kernel, stride, padding, dilation, ceil_mode)

        assert F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode).shape == actual.shape
        assert dilation > 1 or torch.isfinite(actual).all()  # torch, too, dilates windows out of sight of the image

    def test_windows_that_stick_out_see_the_image_only(self) -> None:
        """Windows start at 0 and 2; blurring also reads the one at 1."""
        x = torch.tensor([[[[1.0, 5.0, 3.0]]]]).expand(1, 1, 3, 3)
        inner = torch.tensor([[5.0, 5.0, 3.0]]).expand(3, 3)

        torch.testing.assert_close(slow_blur(inner, 2), blurmax_pool2d(x, 2, 2, ceil_mode=True)[0, 0])

    def test_a_captured_graph_holds_the_pooling_operator(self) -> None:
        class Pool(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return blurmax_pool2d(x, 3, 2, 1)

        x = draw(2, 8, 9, 9)
        graph = torch.export.export(Pool(), (x,))

        assert any("max_pool2d" in str(node.target) for node in graph.graph.nodes)
        torch.testing.assert_close(blurmax_pool2d(x, 3, 2, 1), graph.module()(x))

    def test_the_input_is_not_modified(self) -> None:
        x = draw(2, 8, 6, 6)
        before = x.clone()
        blurmax_pool2d(x, 1)
        blurmax_pool2d(x, 3, 2, 1, ceil_mode=True)

        assert torch.equal(before, x)

    def test_windows_must_see_the_image(self) -> None:
        with pytest.raises(ValueError, match=r"`padding` must be at most half the window, \(1, 1\), got \(2, 2\)"):
            blurmax_pool2d(torch.zeros(1, 1, 4, 4), kernel_size=2, padding=2)
