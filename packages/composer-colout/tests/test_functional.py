"""`colout_batch` against plain indexing, and the distribution of its draws."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from composer import functional as cf
from composer.algorithms.colout import ColOutTransform, batch_colout, colout_batch
from composer.algorithms.colout.colout import colout


def numbered(*shape: int) -> torch.Tensor:
    """Images in which each pixel tells its row (tens of thousands) and column."""
    height, width = shape[-2:]
    return (torch.arange(height)[:, None] * 10_000 + torch.arange(width)).expand(shape).clone()


def kept_by(image: torch.Tensor) -> tuple[list[int], list[int]]:
    """The rows and columns that are left of a numbered image."""
    image = image.reshape(-1, *image.shape[-2:])[0]
    return (image[:, 0] // 10_000).tolist(), (image[0] % 10_000).tolist()


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    p=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1000),
)
def test_rows_and_columns_are_left_out_of_all_images_alike(
    lead: list[int], size: tuple[int, int], p: tuple[float, float], seed: int
) -> None:
    torch.manual_seed(seed)
    images = numbered(*lead, *size)
    smaller = colout_batch(images, *p)
    rows, columns = kept_by(smaller)

    assert torch.equal(images[..., rows, :][..., columns], smaller)
    assert [max(int((1 - q) * n), 1) for q, n in zip(p, size, strict=True)] == list(smaller.shape[-2:])
    assert (sorted(set(rows)), sorted(set(columns))) == (rows, columns)


@pytest.mark.parametrize("p", [0, 0.15])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: Image.fromarray(x[0].numpy())])
def test_sizes_are_what_the_formula_says(p: float, make: Callable[[torch.Tensor], Any]) -> None:
    smaller = colout_batch(make(torch.zeros(3, 32, 48, dtype=torch.uint8)), p, 2 * p)
    size = (smaller.height, smaller.width) if isinstance(smaller, Image.Image) else smaller.shape[-2:]

    assert (int((1 - p) * 32), int((1 - 2 * p) * 48)) == tuple(size)


def test_with_everything_dropped_one_pixel_stays() -> None:
    assert (2, 3, 1, 1) == colout_batch(torch.zeros(2, 3, 8, 8), 1, 1).shape


def test_every_row_and_column_is_equally_likely() -> None:
    torch.manual_seed(0)
    counts = torch.zeros(2, 10)
    for _ in range(2000):
        for count, kept in zip(counts, kept_by(colout_batch(numbered(10, 10), 0.5, 0.5)), strict=True):
            count[kept] += 1

    # Each is kept with probability 1/2: Binomial(2000, 1/2) has mean 1000 and deviation 22.4; 5 deviations are allowed.
    assert float((counts - 1000).abs().max()) < 112


def test_rows_and_columns_are_drawn_independently() -> None:
    torch.manual_seed(1)
    rows, columns = kept_by(colout_batch(numbered(100, 100), 0.5, 0.5))

    assert rows != columns


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_kept_and_arguments_not_modified_or_shared(dtype: torch.dtype) -> None:
    images = numbered(2, 3, 8, 8).to(dtype)
    before = images.clone()
    for p in (0, 0.2):
        smaller = colout_batch(images, p, p)
        assert dtype is smaller.dtype
        smaller.zero_()

    assert torch.equal(before, images)


def test_images_need_not_be_contiguous() -> None:
    torch.manual_seed(2)
    expected = colout_batch(numbered(2, 3, 8, 8))
    for images in (
        numbered(2, 3, 8, 8).to(memory_format=torch.channels_last),
        numbered(2, 3, 8, 8).transpose(-1, -2).contiguous().transpose(-1, -2),
    ):
        torch.manual_seed(2)
        assert torch.equal(expected, colout_batch(images))


def test_gradients_flow_to_the_pixels_that_are_kept() -> None:
    images = torch.zeros(2, 8, 8, requires_grad=True)
    colout_batch(images, 0.25, 0.5).sum().backward()

    assert images.grad is not None
    assert 2 * 6 * 4 == int(images.grad.sum())
    assert {0.0, 1.0} == set(images.grad.unique().tolist())


# ---- Pillow images


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "CMYK", "P", "1", "I", "F"])
def test_pillow_images_lose_pixels_and_nothing_else(picture: Image.Image, mode: str) -> None:
    image = picture.convert(mode)
    before = image.tobytes()
    torch.manual_seed(3)
    rows, columns = kept_by(colout_batch(numbered(32, 40), 0.25, 0.5))
    torch.manual_seed(3)
    smaller = colout_batch(image, 0.25, 0.5)

    assert isinstance(smaller, Image.Image)
    assert (mode, (20, 24)) == (smaller.mode, smaller.size)
    expected = np.asarray(image.convert("RGBA") if mode == "P" else image)[rows][:, columns]
    assert np.array_equal(expected, np.asarray(smaller.convert("RGBA") if mode == "P" else smaller))
    assert before == image.tobytes()


# ---- pairs


def test_targets_that_are_images_lose_the_same_pixels(picture: Image.Image) -> None:
    x = numbered(4, 3, 32, 40)
    for target in (numbered(4, 32, 40), numbered(4, 1, 32, 40).float()):
        smaller, smaller_target = colout_batch((x, target))
        assert kept_by(smaller) == kept_by(smaller_target.long())
        assert target.dtype is smaller_target.dtype
    smaller, mask = colout_batch([picture, picture.convert("L")])
    assert np.array_equal(np.asarray(smaller.convert("L")), np.asarray(mask))


@pytest.mark.parametrize(
    "target",
    [torch.arange(4), torch.zeros(4, 10), torch.zeros(8, 8), torch.zeros(4, 6, 6), torch.empty(0), 3, None, "cat"],
)
@pytest.mark.parametrize("resize_target", ["auto", False])
def test_only_the_input_is_returned_for_pairs_with_other_targets(target: Any, resize_target: Any) -> None:
    smaller = colout_batch((torch.zeros(4, 3, 8, 8), target), resize_target=resize_target)

    assert (4, 3, 6, 6) == smaller.shape


def test_a_target_is_resized_on_request() -> None:
    smaller, target = colout_batch((numbered(3, 8, 8), numbered(8, 8)), resize_target=True)
    assert kept_by(smaller) == kept_by(target)

    assert (3, 6, 6) == colout_batch((numbered(3, 8, 8), numbered(1, 8, 8)), resize_target=False).shape


# ---- draws, transform, names


def test_the_same_seed_gives_the_same_pixels_whatever_the_default_device_is() -> None:
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(4)
        images = numbered(2, 3, 16, 16)
        with torch.device(device):
            results.append(colout_batch(images))

    assert torch.equal(results[0], results[1])


def test_pixels_are_drawn_from_the_given_generator() -> None:
    first, second = (colout_batch(numbered(30, 30), generator=torch.Generator().manual_seed(5)) for _ in range(2))

    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_read_from_a_device() -> None:
    images, masks = numbered(4, 3, 32, 32).cuda(), numbered(4, 32, 32).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        smaller, target = colout_batch((images, masks))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert kept_by(smaller) == kept_by(target)
    assert images.device == smaller.device


def test_the_transform_and_the_earlier_names_do_the_same(picture: Image.Image) -> None:
    transform = pickle.loads(pickle.dumps(ColOutTransform(0.5, 0.25)))  # workers may get it pickled
    results = []
    for drop in (transform, lambda x: colout_batch(x, 0.5, 0.25), lambda x: colout(x, 0.5, 0.25)):
        torch.manual_seed(6)
        results.append(drop(picture).tobytes())
    torch.manual_seed(6)
    expected = colout_batch(numbered(2, 8, 8))
    torch.manual_seed(6)

    assert results[0] == results[1] == results[2]
    assert torch.equal(expected, batch_colout(numbered(2, 8, 8)))
    assert "ColOutTransform(p_row=0.5, p_col=0.25, resize_target='auto')" == repr(transform)
    assert (cf.colout_batch, cf.batch_colout, cf.colout) == (colout_batch, batch_colout, colout)


# ---- errors


@pytest.mark.parametrize("make", [lambda **kwargs: colout_batch(torch.zeros(4, 4), **kwargs), ColOutTransform])
def test_invalid_arguments_are_refused(make: Callable[..., Any]) -> None:
    for name in ("p_row", "p_col"):
        for fraction in (-0.1, 1.5):
            with pytest.raises(ValueError, match=rf"`{name}` must be in \[0, 1\], got {fraction}. It is the fraction"):
                make(**{name: fraction})
    for resize_target in ("yes", 3, None):
        with pytest.raises(ValueError, match=r"`resize_target` must be True, False or 'auto', got"):
            make(resize_target=resize_target)


def test_invalid_samples_are_refused() -> None:
    x = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"`sample` must have two parts, an input and a target, got 3"):
        colout_batch((x, 1, 2))
    with pytest.raises(ValueError, match=r"must not be True for a sample without a target. Pass a pair"):
        colout_batch(x, resize_target=True)
    for target, found in ((torch.zeros(2, 4, 4), r"\(4, 4\)"), (3, "int")):
        with pytest.raises(ValueError, match=rf"must have the size of the input, \(8, 8\), to be resized, got {found}"):
            colout_batch((x, target), resize_target=True)
    for input in (torch.zeros(8), "image"):
        with pytest.raises(TypeError, match=r"`sample` must be an image or a batch of images, got"):
            colout_batch(input)


def test_the_module_is_not_hidden_by_the_function_of_its_name() -> None:
    import composer.algorithms.colout.colout as module

    assert module.colout is cf.colout


def test_the_mask_of_one_image_loses_the_same_pixels() -> None:
    image = torch.randint(9, (1, 8, 6))
    smaller, mask = colout_batch((image, image[0]))

    assert torch.equal(smaller[0], mask)
