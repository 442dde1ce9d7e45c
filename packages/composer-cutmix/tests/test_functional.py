"""`cutmix_batch` against a loop over pixels, and the distribution of its boxes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.cutmix import cutmix_batch
from composer.algorithms.cutmix.cutmix import _rand_bbox, cutmix
from composer.algorithms.utils.mixing import draw_beta


def slow_cutmix(input: torch.Tensor, indices: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    x1, y1, x2, y2 = box
    mixed = input.clone()
    for i in range(input.shape[0]):
        for x in range(input.shape[2]):
            for y in range(input.shape[3]):
                if x1 <= x < x2 and y1 <= y < y2:
                    mixed[i, :, x, y] = input[int(indices[i]), :, x, y]
    return mixed


def area_of(box: tuple[int, int, int, int]) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])


@settings(deadline=None, max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    alpha=st.floats(0, 4),
    uniform_sampling=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_box_is_the_partners_and_the_rest_is_the_images(
    shape: tuple[int, int, int, int], alpha: float, uniform_sampling: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    input, target, indices = torch.randn(shape), torch.arange(shape[0]), torch.randperm(shape[0])
    before = input.clone()
    mixed, partner, area, box = cutmix_batch(
        input, target, alpha=alpha, indices=indices, uniform_sampling=uniform_sampling
    )

    assert torch.equal(slow_cutmix(input, indices, box), mixed)
    assert torch.equal(target[indices], partner)
    assert 1 - area_of(box) / (shape[2] * shape[3]) == area
    assert type(area) is float
    assert torch.equal(before, input)


def test_drawn_partners_are_a_permutation() -> None:
    torch.manual_seed(0)
    _, partner, _, _ = cutmix_batch(torch.zeros(30, 1, 2, 2), torch.arange(30))

    assert torch.equal(torch.arange(30), partner.sort().values)
    assert not torch.equal(torch.arange(30), partner)


@pytest.mark.parametrize(("length", "pixels"), [(0.0, 0), (0.1, 1), (0.3, 9), (0.7, 49), (1.0, 100)])
def test_a_length_is_the_side_of_the_box(length: float, pixels: int) -> None:
    """Not the side of a box that leaves this share of the image."""
    torch.manual_seed(0)
    x, y = torch.zeros(2, 1, 10, 10), torch.arange(2)
    boxes = [cutmix_batch(x, y, length=length)[3] for _ in range(200)]

    assert pixels == max(map(area_of, boxes))


def test_sides_are_in_proportion_to_the_images() -> None:
    torch.manual_seed(0)
    boxes = [cutmix_batch(torch.zeros(1, 1, 40, 20), torch.zeros(1), length=0.5)[3] for _ in range(300)]

    assert (20, 10) == (max(b[2] - b[0] for b in boxes), max(b[3] - b[1] for b in boxes))


class TestBox:
    @settings(deadline=None)
    @given(
        width=st.integers(1, 30),
        height=st.integers(1, 30),
        share=st.floats(0, 1),
        uniform_sampling=st.booleans(),
    )
    def test_it_is_inside_the_image_and_no_larger_than_its_share(
        self, width: int, height: int, share: float, uniform_sampling: bool
    ) -> None:
        x1, y1, x2, y2 = _rand_bbox(width, height, share, uniform_sampling=uniform_sampling)
        side = math.sqrt(1 - share)

        assert 0 <= x1 <= x2 <= width
        assert 0 <= y1 <= y2 <= height
        assert x2 - x1 <= int(width * side)
        assert y2 - y1 <= int(height * side)

    @pytest.mark.parametrize(("share", "side"), [(0.75, 5), (0.19, 9), (1 - 0.4**2, 4), (0.0, 10), (1.0, 0)])
    def test_it_has_its_full_sides_in_the_middle(self, share: float, side: int) -> None:
        """Also odd ones."""
        x1, y1, x2, y2 = _rand_bbox(10, 10, share, cx=5, cy=5)

        assert (side, side) == (x2 - x1, y2 - y1)

    def test_it_is_clipped_at_the_edges(self) -> None:
        assert (0, 8, 2, 10) == _rand_bbox(10, 10, 0.84, cx=0, cy=10)

    def test_uniform_sampling_treats_all_pixels_alike(self) -> None:
        torch.manual_seed(0)
        draws, counts = 20_000, torch.zeros(9)
        for _ in range(draws):
            x1, _, x2, _ = _rand_bbox(9, 1, 0.5, uniform_sampling=True)
            counts[x1:x2] += 1

        # Sides are int(9 * sqrt(0.5)) = 6 long and start at -5 to 8: a pixel is in 6 of 14. The standard error of such
        # a frequency is sqrt(6/14 * 8/14 / 20000) = 0.0035; 4.5 sigma are allowed, for nine pixels.
        torch.testing.assert_close(torch.full((9,), 6 / 14), counts / draws, atol=0.016, rtol=0)

    def test_otherwise_centers_are_uniform_over_the_pixels(self) -> None:
        torch.manual_seed(0)
        draws, starts = 20_000, torch.zeros(9)
        for _ in range(draws):
            x1, _, x2, _ = _rand_bbox(9, 1, 1 - 1 / 9**2, uniform_sampling=False)  # a side of one pixel
            assert x2 - x1 == 1
            starts[x1] += 1

        # The standard error of a frequency of 1/9 is sqrt(1/9 * 8/9 / 20000) = 0.0022; 4.5 sigma are allowed.
        torch.testing.assert_close(torch.full((9,), 1 / 9), starts / draws, atol=0.010, rtol=0)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_share_follows_a_beta_distribution(alpha: float) -> None:
    torch.manual_seed(3)
    draws = torch.tensor([draw_beta(alpha) for _ in range(20_000)], dtype=torch.float64)

    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)). With 20,000 draws the standard errors are below
    # 0.5 / sqrt(20000) = 0.0035 and 0.25 / sqrt(20000) = 0.0018; 5 sigma are allowed.
    assert math.isclose(0.5, float(draws.mean()), abs_tol=0.018)
    assert math.isclose(1 / (4 * (2 * alpha + 1)), float(draws.var()), abs_tol=0.009)


def test_alpha_zero_is_the_largest_box() -> None:
    assert 0.0 == draw_beta(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_memory_formats_are_kept(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    mixed = cutmix_batch(x, torch.arange(2))[0]

    assert dtype is mixed.dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_the_result_shares_no_memory_with_the_input() -> None:
    x = torch.randn(2, 1, 4, 4)
    before = x.clone()
    for box in ((0, 0, 0, 0), (0, 0, 4, 4)):
        cutmix_batch(x, torch.arange(2), bbox=box, indices=torch.arange(2))[0].fill_(9)

    assert torch.equal(before, x)


def test_gradients_flow_to_both_partners() -> None:
    x = torch.randn(2, 1, 2, 2, requires_grad=True)
    mixed = cutmix_batch(x, torch.arange(2), bbox=(0, 0, 1, 1), indices=torch.tensor([1, 0]))[0]
    mixed[0].sum().backward()

    assert x.grad is not None
    assert [[0.0, 1.0], [1.0, 1.0]] == x.grad[0, 0].tolist()
    assert [[1.0, 0.0], [0.0, 0.0]] == x.grad[1, 0].tolist()


def test_the_partners_are_drawn_from_the_given_generator() -> None:
    x, y = torch.zeros(16, 1, 2, 2), torch.arange(16)
    first, second = (cutmix_batch(x, y, generator=torch.Generator().manual_seed(5))[1] for _ in range(2))

    assert torch.equal(first, second)


class TestOlderForm:
    def test_it_returns_dense_targets_weighted_by_area(self) -> None:
        x, y = torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2])
        p = torch.tensor([1, 2, 0])
        mixed, targets = cutmix(x, y, 1.0, 4, bbox=(0, 0, 2, 2), indices=p)

        assert torch.equal(slow_cutmix(x, p, (0, 0, 2, 2)), mixed)
        expected = torch.tensor([[0.75, 0.25, 0, 0], [0, 0.75, 0.25, 0], [0.25, 0, 0.75, 0]])
        torch.testing.assert_close(expected, targets)

    def test_dense_targets_are_weighted_too(self) -> None:
        x, y = torch.randn(2, 1, 2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        _, targets = cutmix(x, y, 1.0, 2, bbox=(0, 0, 1, 2), indices=torch.tensor([1, 0]))

        torch.testing.assert_close(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), targets)

    def test_images_and_targets_use_the_same_draws(self) -> None:
        torch.manual_seed(0)
        x = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 6, 6)  # image i is all i, so its content tells who it is
        mixed, targets = cutmix(x, torch.arange(8), 1.0, 8)

        for i in range(8):
            shares = torch.bincount(mixed[i].flatten().long(), minlength=8) / 36
            torch.testing.assert_close(shares, targets[i])


def test_they_are_functions_of_composer() -> None:
    assert cf.cutmix_batch is cutmix_batch
    assert cf.cutmix is cutmix


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_read_from_the_gpu() -> None:
    x, y = torch.randn(8, 3, 16, 16, device="cuda"), torch.arange(8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed, partner, _, box = cutmix_batch(x, y, alpha=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(slow_cutmix(x.cpu(), partner.cpu(), box), mixed.cpu())


class TestRefused:
    x, y = torch.zeros(2, 1, 4, 6), torch.arange(2)

    def test_a_length_together_with_a_box(self) -> None:
        with pytest.raises(ValueError, match=r"`length` must not be given together with `bbox`, got 0.5"):
            cutmix_batch(self.x, self.y, length=0.5, bbox=(0, 0, 1, 1))

    @pytest.mark.parametrize("length", [-0.1, 1.5])
    def test_a_length_outside_0_and_1(self, length: float) -> None:
        with pytest.raises(ValueError, match=r"`length` must be in \[0, 1\], got"):
            cutmix_batch(self.x, self.y, length=length)

    @pytest.mark.parametrize("box", [(-1, 0, 1, 1), (0, 0, 5, 1), (0, 0, 1, 7), (2, 0, 1, 1)])
    def test_a_box_outside_the_image(self, box: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match=r"`bbox` must be \(x1, y1, x2, y2\) inside an image of 4 by 6 pixels"):
            cutmix_batch(self.x, self.y, bbox=box)

    def test_a_negative_alpha(self) -> None:
        with pytest.raises(ValueError, match=r"`alpha` must not be negative or infinite, got -1"):
            cutmix_batch(self.x, self.y, alpha=-1)

    def test_an_alpha_that_is_not_a_number(self) -> None:
        with pytest.raises(TypeError, match=r"`alpha` must be a number, got '1'"):
            cutmix_batch(self.x, self.y, alpha="1")  # type: ignore[arg-type]

    def test_inputs_that_are_not_images_and_targets_of_another_length(self) -> None:
        with pytest.raises(ValueError, match=r"`input` must have shape \(N, C, W, H\) and `target` as many rows"):
            cutmix_batch(torch.zeros(2, 4, 4), self.y)
        with pytest.raises(ValueError, match=r"`target` as many rows, got \(2, 1, 4, 6\) and \(3,\)"):
            cutmix_batch(self.x, torch.arange(3))
