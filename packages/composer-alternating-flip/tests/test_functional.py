"""`flip_batch` and its hashes against the listing of the paper, one image after the other."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.alternating_flip import compute_flip_parities, flip_batch


def listed_hash(n: int, seed: int = 42) -> int:
    """As in the listing of the paper."""
    return int(hashlib.md5(bytes(str(n * seed), "utf-8")).hexdigest()[-8:], 16)


def test_the_functions_are_registered() -> None:
    assert flip_batch is cf.flip_batch
    assert compute_flip_parities is cf.compute_flip_parities


def test_hashes_are_those_of_known_digests() -> None:
    assert [0xF98764DA, 0xF4AC58A6, 0x4B319D21] == [listed_hash(n) for n in range(3)]  # of md5 of 0, 42 and 84
    assert [0, 0, 1] == compute_flip_parities(3).tolist()


@settings(deadline=None, max_examples=50)
@given(count=st.integers(0, 40), seed=st.integers(-(10**6), 10**6))
def test_parities_are_those_of_the_listed_hashes(count: int, seed: int) -> None:
    parities = compute_flip_parities(count, seed)

    assert torch.uint8 is parities.dtype
    assert [listed_hash(n, seed) % 2 for n in range(count)] == parities.tolist()


def test_half_of_the_images_are_mirrored_in_each_epoch() -> None:
    """Of 50,000, Binomial(50000, 1/2): the deviation is 112; 5 deviations are allowed."""
    assert abs(int(compute_flip_parities(50_000).sum()) - 25_000) < 560


@settings(deadline=None, max_examples=25)
@given(indices=st.lists(st.integers(0, 99), min_size=1, max_size=8), epoch=st.integers(0, 9))
def test_an_image_is_mirrored_if_its_hash_and_the_epoch_are_even_together(indices: list[int], epoch: int) -> None:
    images = torch.arange(len(indices) * 3 * 4.0).view(len(indices), 1, 3, 4)
    expected = [
        image.flip(2) if (listed_hash(n) + epoch) % 2 == 0 else image for image, n in zip(images, indices, strict=True)
    ]
    parities = compute_flip_parities(100)[indices]

    assert torch.equal(torch.stack(expected), flip_batch(images, parities, epoch))
    assert torch.equal(torch.stack(expected), flip_batch(images, parities, torch.tensor(epoch)))


def test_two_consecutive_epochs_hold_every_image_once_each_way() -> None:
    images = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    before, parities = images.clone(), compute_flip_parities(64)
    for epoch in range(3):
        first, second = flip_batch(images, parities, epoch), flip_batch(images, parities, epoch + 1)
        assert torch.equal(first, second.flip(3))
        for one, two, image in zip(first, second, images, strict=True):
            assert torch.equal(one, image) != torch.equal(two, image)

    assert torch.equal(before, images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    assert dtype is flip_batch(torch.zeros(2, 3, 4, 4, dtype=dtype), torch.tensor([0, 1]), 0).dtype


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one value per image, got shapes \(2, 3\) and \(3,\)"):
        flip_batch(torch.zeros(2, 3), torch.zeros(3), 0)
    with pytest.raises(TypeError, match=r"`epoch` must be an integer, got 0.5"):
        flip_batch(torch.zeros(2, 3), torch.zeros(2), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`num_samples` must not be negative, got -1"):
        compute_flip_parities(-1)
    with pytest.raises(TypeError, match=r"`seed` must be a number, got '42'"):
        compute_flip_parities(1, "42")  # type: ignore[arg-type]
