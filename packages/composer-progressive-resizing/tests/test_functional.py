"""`resize_batch` against loops over pixels and torch's interpolation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.progressive_resizing import resize_batch

SIZES = [(8, 8), (7, 7), (9, 6), (5, 12)]
MODES = ["resize", "crop"]


def numbered(height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Two equal images of one channel whose pixels have all different values."""
    return torch.arange(height * width).view(1, 1, height, width).repeat(2, 1, 1, 1).to(dtype)


def slow_resize(images: torch.Tensor, factor: float) -> torch.Tensor:
    """Pixel by pixel: the one whose index is that of the result divided by the factor, rounded down."""
    height, width = (int(factor * n) for n in images.shape[-2:])
    rows = [int(torch.tensor(i) * torch.tensor(1 / factor)) for i in range(height)]
    columns = [int(torch.tensor(i) * torch.tensor(1 / factor)) for i in range(width)]
    return torch.stack([torch.stack([images[..., i, j] for j in columns], -1) for i in rows], -2)


def windows(image: torch.Tensor, height: int, width: int) -> list[torch.Tensor]:
    tops, lefts = range(image.shape[-2] - height + 1), range(image.shape[-1] - width + 1)
    return [image[..., i : i + height, j : j + width] for i in tops for j in lefts]


def test_the_registered_function_is_this_one() -> None:
    assert resize_batch is cf.resize_batch


@pytest.mark.parametrize("mode", [*MODES, "unchecked"])
@pytest.mark.parametrize("factor", [1, 1.0, 1.7])
def test_at_full_scale_the_arguments_are_returned_unchanged(mode: str, factor: float) -> None:
    x = numbered(4, 4)
    for y in (x, None):
        smaller, target = resize_batch(x, y, factor, mode, resize_targets=True)

        assert smaller is x
        assert target is y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [0.3, 0.5, 0.7, 0.99])
def test_resizing_takes_the_nearest_pixels(size: tuple[int, int], factor: float) -> None:
    x, y = numbered(*size), torch.tensor([0, 1])
    smaller, target = resize_batch(x, y, factor)

    assert torch.equal(slow_resize(x, factor), smaller)
    assert target is y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [0.3, 0.5, 0.7, 0.99])
def test_cropping_cuts_one_window_out_of_all_images(size: tuple[int, int], factor: float) -> None:
    x = numbered(*size)
    height, width = (int(factor * n) for n in size)
    smaller, _ = resize_batch(x, None, factor, "crop")

    assert any(torch.equal(window, smaller) for window in windows(x, height, width))


def test_every_window_is_cropped_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    x = numbered(4, 3)
    corners = [int(resize_batch(x, None, 0.67, "crop", generator=generator)[0][0, 0, 0, 0]) for _ in range(1800)]
    counts = {corner: corners.count(corner) for corner in set(corners)}

    assert {int(window[0, 0, 0, 0]) for window in windows(x, 2, 2)} == set(counts)
    assert all(240 < count < 360 for count in counts.values())  # 300 each of 6, plus or minus 4 deviations


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
)
def test_targets_of_the_same_size_match_the_inputs(mode: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbered(*size)
    y = x.squeeze(1).to(dtype)
    smaller, target = resize_batch(x, y, 0.6, mode, resize_targets=True)

    assert target.dtype is dtype
    assert torch.equal(smaller.squeeze(1).to(dtype), target)
    torch.manual_seed(1)
    smaller, target = resize_batch(x, x, 0.6, mode, resize_targets=True)
    assert torch.equal(smaller, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.36, 0.48, 0.97])
def test_labels_follow_the_pixels_whatever_the_precision_of_the_images(dtype: torch.dtype, factor: float) -> None:
    """At these factors float32 and float64 images of 224 pixels round to different neighbours."""
    columns = torch.arange(224).expand(1, 1, 2, 224).repeat(1, 1, 112, 1)
    smaller, labels = resize_batch(columns.to(dtype), columns[:, 0], factor, resize_targets=True)

    assert torch.equal(smaller[:, 0].long(), labels)


def test_large_integers_survive() -> None:
    y = torch.full((1, 4, 4), 2**40 + 1)

    assert [2**40 + 1] == resize_batch(numbered(4, 4)[:1], y, 0.5, resize_targets=True)[1].unique().tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [(), (3,)])
def test_targets_of_another_size_keep_their_own_scale(mode: str, channels: tuple[int, ...]) -> None:
    x, y = numbered(8, 6), torch.zeros(2, *channels, 16, 12)
    smaller, target = resize_batch(x, y, 0.5, mode, resize_targets=True)

    assert (2, 1, 4, 3) == smaller.shape
    assert (2, *channels, 8, 6) == target.shape


def test_targets_of_twice_the_size_are_cropped_at_twice_the_corner() -> None:
    x = numbered(8, 6)
    y = F.interpolate(x, scale_factor=2.0, mode="nearest")
    for seed in range(8):
        torch.manual_seed(seed)
        smaller, target = resize_batch(x, y, 0.5, "crop", resize_targets=True)

        assert torch.equal(smaller, target[..., ::2, ::2])


@settings(deadline=None)
@given(
    size=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    other=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    factor=st.floats(0.5, 0.999),
    mode=st.sampled_from(MODES),
)
def test_both_have_the_scaled_size(size: tuple[int, int], other: tuple[int, int], factor: float, mode: str) -> None:
    smaller, target = resize_batch(torch.zeros(1, 1, *size), torch.zeros(1, *other), factor, mode, resize_targets=True)

    assert tuple(int(factor * n) for n in size) == smaller.shape[2:]
    assert tuple(int(factor * n) for n in other) == target.shape[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("mode", MODES)
def test_dtypes_are_kept_and_arguments_not_modified(dtype: torch.dtype, mode: str) -> None:
    x = numbered(6, 6, dtype)
    before = x.clone()

    assert dtype is resize_batch(x, None, 0.5, mode)[0].dtype
    assert torch.equal(before, x)


def test_the_corner_is_drawn_on_the_host_whatever_the_default_device_is() -> None:
    x = numbered(16, 16)
    torch.manual_seed(4)
    expected, _ = resize_batch(x, None, 0.5, "crop")
    torch.manual_seed(4)
    with torch.device("meta"):
        actual, _ = resize_batch(x, None, 0.5, "crop")

    assert torch.equal(expected, actual)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mode` must be 'crop' or 'resize', got 'shrink'"):
        resize_batch(numbered(4, 4), None, 0.5, "shrink")


@pytest.mark.parametrize("factor", [0.1, 0, -0.5])
def test_a_scale_that_leaves_no_pixel_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=rf"`scale_factor` must leave at least one pixel, got {factor} for `input`"):
        resize_batch(numbered(4, 40), None, factor)


def test_tensors_that_are_not_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`input` must have shape \(N, C, H, W\) to be resized, got \(4, 4, 4\)"):
        resize_batch(torch.zeros(4, 4, 4), None, 0.5)
    with pytest.raises(ValueError, match=r"`target` must have shape \(N, H, W\) or \(N, C, H, W\) .*, got \(2,\)"):
        resize_batch(numbered(4, 4), torch.zeros(2), 0.5, resize_targets=True)
    with pytest.raises(TypeError, match=r"`target` must be a tensor to be resized, got NoneType"):
        resize_batch(numbered(4, 4), None, 0.5, resize_targets=True)


def test_the_earlier_name_works() -> None:
    x, y = torch.rand(2, 3, 8, 6), torch.arange(2)
    expected, actual = resize_batch(x, y, 0.5), cf.resize_inputs(X=x, y=y, scale_factor=0.5)

    assert torch.equal(expected[0], actual[0])
    assert y is actual[1]
