"""`cutout_batch` against a loop over pixels, and the distribution of its holes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from composer import functional as cf
from composer.algorithms.cutout import cutout_batch
from composer.algorithms.cutout.cutout import _generate_mask


def slow_mask(height: int, width: int, x: int, y: int, side: int) -> torch.Tensor:
    """Ones with one hole, one pixel at a time."""
    mask = torch.ones(height, width)
    for i, j in itertools.product(range(height), range(width)):
        if 0 <= i - (y - side // 2) < side and 0 <= j - (x - side // 2) < side:
            mask[i, j] = 0
    return mask


def bounds(mask: torch.Tensor) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of the zeros of a mask, which must be a full rectangle."""
    rows, columns = (mask == 0).any(1).nonzero().flatten(), (mask == 0).any(0).nonzero().flatten()
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    assert (bottom - top) * (right - left) == int((mask == 0).sum())
    return top, bottom, left, right


class TestHole:
    @pytest.mark.parametrize("side", [1, 2, 3, 4, 7])
    @pytest.mark.parametrize(("x", "y"), [(0, 0), (12, 8), (0, 8), (12, 0), (6, 4), (6, 0), (12, 4), (11, 7)])
    def test_it_is_one_rectangle_clipped_at_the_edges(self, x: int, y: int, side: int) -> None:
        """A center may be as far as the size of the image."""
        mask = torch.ones(8, 12)

        assert torch.equal(slow_mask(8, 12, x, y, side), _generate_mask(mask, 12, 8, x, y, side))

    @pytest.mark.parametrize("side", [0, 1, 2, 3, 4, 5, 6])
    def test_it_has_its_full_side_in_the_middle(self, side: int) -> None:
        """Also an odd one."""
        assert side**2 == int((_generate_mask(torch.ones(12, 12), 12, 12, 6, 6, side) == 0).sum())


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    length=st.floats(0, 1),
    uniform_sampling=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_one_hole_is_zeroed_in_all_images_and_channels(
    shape: list[int], length: float, uniform_sampling: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    input = torch.rand(shape) + 1
    before = input.clone()
    output = cutout_batch(input, length=length, uniform_sampling=uniform_sampling)
    side = int(length * min(shape[-2:]))
    mask = output.flatten(0, -3)[0] if len(shape) > 2 else output

    assert torch.equal(before, input)
    assert torch.equal(input * (mask != 0), output)
    if side == 0:
        assert torch.equal(input, output)
    else:
        top, bottom, left, right = bounds(mask)
        assert bottom - top <= side
        assert right - left <= side


def test_holes_have_their_full_side_somewhere() -> None:
    torch.manual_seed(0)
    sizes = set()
    for _ in range(100):
        top, bottom, left, right = bounds(cutout_batch(torch.ones(10, 20), length=0.5))
        sizes.add((bottom - top, right - left))

    assert (5, 5) == max(sizes)


def test_the_side_is_a_fraction_of_the_shorter_one() -> None:
    image = cutout_batch(torch.ones(1, 40, 10), length=1.0, uniform_sampling=True)

    assert bounds(image[0])[1] - bounds(image[0])[0] <= 10


def test_every_hole_is_cut() -> None:
    torch.manual_seed(0)
    holes = [int((cutout_batch(torch.ones(50, 50), n, length=0.04) == 0).sum()) for n in (0, 1, 40)]

    assert 0 == holes[0]
    assert 1 <= holes[1] <= 4
    # 40 holes of 2 by 2 pixels cover about 2500 * (1 - (1 - 4 / 2500) ** 40) = 155 of them.
    assert 120 < holes[2] <= 160


def test_uniform_sampling_treats_all_pixels_alike() -> None:
    torch.manual_seed(0)
    draws, counts = 10_000, torch.zeros(7, 9)
    for _ in range(draws):
        counts += cutout_batch(torch.ones(7, 9), length=0.5, uniform_sampling=True) == 0

    # Sides of 3 start at -2 to 6 and at -2 to 8: a pixel is in 3/9 * 3/11 of the holes. The standard error of such a
    # frequency is sqrt(0.0909 * 0.9091 / 10000) = 0.0029; 5 sigma are allowed, for 63 pixels.
    torch.testing.assert_close(torch.full((7, 9), 1 / 11), counts / draws, atol=0.015, rtol=0)


def test_otherwise_centers_are_uniform_over_the_pixels() -> None:
    torch.manual_seed(0)
    draws, counts = 10_000, torch.zeros(5, 7)
    for _ in range(draws):
        counts += cutout_batch(torch.ones(5, 7), length=0.2) == 0  # one pixel

    # The standard error of a frequency of 1/35 is sqrt(1/35 * 34/35 / 10000) = 0.0017; 5 sigma are allowed.
    torch.testing.assert_close(torch.full((5, 7), 1 / 35), counts / draws, atol=0.0085, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_memory_formats_are_kept(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    output = cutout_batch(x)

    assert dtype is output.dtype
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_the_result_shares_no_memory_with_the_input() -> None:
    x = torch.ones(1, 4, 4)
    for output in (cutout_batch(x, length=0.0), cutout_batch(x, num_holes=0)):
        output.fill_(9)

    assert torch.equal(torch.ones(1, 4, 4), x)


def test_no_gradient_comes_through_the_hole() -> None:
    x = torch.ones(1, 4, 4, requires_grad=True)
    output = cutout_batch(x)
    output.sum().backward()

    assert x.grad is not None
    assert torch.equal(output.detach(), x.grad)


class TestPIL:
    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "F", "I", "1", "CMYK", "P"])
    def test_modes_are_kept_and_every_band_is_zeroed(self, mode: str) -> None:
        image = Image.new(mode, (12, 8), 1 if mode in ("L", "F", "I", "1", "P") else tuple([1] * len(mode)))
        before = image.tobytes()
        output = cutout_batch(image, length=1.0, uniform_sampling=True)

        assert (mode, (12, 8)) == (output.mode, output.size)
        assert before == image.tobytes()
        assert before != output.tobytes()
        assert not any(value for low, value in (band.getextrema() for band in _cropped(output)))

    def test_holes_are_those_of_the_tensor(self) -> None:
        image = Image.new("L", (12, 8), 1)
        for uniform_sampling in (False, True):
            torch.manual_seed(3)
            expected = cutout_batch(torch.ones(8, 12, dtype=torch.uint8), 2, 0.4, uniform_sampling)
            torch.manual_seed(3)
            output = cutout_batch(image, 2, 0.4, uniform_sampling)

            assert expected.flatten().tolist() == list(output.tobytes())

    def test_a_hole_of_no_pixels_is_a_copy(self) -> None:
        image = Image.new("RGB", (4, 4), "red")
        output = cutout_batch(image, length=0.1)

        assert output is not image
        assert image.tobytes() == output.tobytes()

    def test_neither_pil_nor_torchvision_is_imported_for_tensors(self) -> None:
        code = (
            "import sys, torch; from composer.algorithms.cutout import cutout_batch; cutout_batch(torch.ones(4, 4));"
            "sys.exit('PIL' in sys.modules or 'torchvision' in sys.modules)"
        )

        assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def _cropped(image: Image.Image) -> tuple[Image.Image, ...]:
    """The bands of the hole in an image that is otherwise nowhere 0."""
    bands = image.split()
    columns = [x for x in range(12) if any(not bands[0].getpixel((x, y)) for y in range(8))]
    rows = [y for y in range(8) if any(not bands[0].getpixel((x, y)) for x in range(12))]
    return image.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)).split()


def test_the_holes_are_drawn_from_the_given_generator() -> None:
    first, second = (cutout_batch(torch.ones(64, 64), 5, generator=torch.Generator().manual_seed(5)) for _ in range(2))

    assert torch.equal(first, second)


def test_it_is_a_function_of_composer() -> None:
    assert cf.cutout_batch is cutout_batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_read_from_the_gpu() -> None:
    torch.manual_seed(0)
    expected = cutout_batch(torch.ones(2, 3, 8, 8))
    x = torch.ones(2, 3, 8, 8, device="cuda")
    torch.manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = cutout_batch(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(expected, output.cpu())


class TestRefused:
    def test_inputs_that_are_not_images(self) -> None:
        with pytest.raises(TypeError, match=r"`input` must be a tensor or a PIL image, got list"):
            cutout_batch([1, 2])
        with pytest.raises(ValueError, match=r"`input` must have a height and a width, got shape \(3,\)"):
            cutout_batch(torch.zeros(3))

    def test_a_negative_number_of_holes(self) -> None:
        with pytest.raises(ValueError, match=r"`num_holes` must not be negative, got -1"):
            cutout_batch(torch.zeros(3, 3), num_holes=-1)

    @pytest.mark.parametrize("length", [-0.1, 1.1])
    def test_a_length_outside_0_and_1(self, length: float) -> None:
        with pytest.raises(ValueError, match=r"`length` must be in \[0, 1\], got"):
            cutout_batch(torch.zeros(3, 3), length=length)
