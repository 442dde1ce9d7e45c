from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from composer.datasets import (
    CenterCrop3d,
    RandomBlur3d,
    RandomBrightness3d,
    RandomContrast3d,
    RandomCrop3d,
    RandomFlip3d,
    RandomNoise3d,
    blur_volume,
)

SHAPE = (4, 5, 6)
NUMBERS = torch.arange(1.0, 121).view(SHAPE)  # of the voxels; 0 is padding
VOLUME = torch.stack([NUMBERS, -NUMBERS])
RANDOM = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))


def test_a_blur_is_a_weighted_mean_of_all_voxels_around() -> None:
    sigma, radius = 0.6, 2
    offsets = list(itertools.product(range(-radius, radius + 1), repeat=3))
    weights = [math.exp(-(a * a + b * b + c * c) / (2 * sigma**2)) for a, b, c in offsets]
    expected = np.zeros(RANDOM.shape)
    for voxel in np.ndindex(*SHAPE):
        for offset, weight in zip(offsets, weights, strict=True):
            inside = [min(max(i + o, 0), n - 1) for i, o, n in zip(voxel, offset, SHAPE, strict=True)]
            expected[(slice(None), *voxel)] += weight / sum(weights) * RANDOM[(slice(None), *inside)].numpy()

    # float32: sums of 125 products of values up to 3
    np.testing.assert_allclose(expected, blur_volume(RANDOM, sigma), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="`sigma` must be positive, got 0"):
        blur_volume(RANDOM, 0)


@pytest.mark.parametrize("size", [(2, 5, 3), (4, 7, 6), (6, 2, 9)], ids=str)
def test_crops_keep_volume_and_mask_together(size: tuple[int, int, int]) -> None:
    """The slow reference: each voxel knows its number, and so its place."""
    torch.manual_seed(0)
    starts: set[tuple[int, ...]] = set()
    for _ in range(60):
        volume, mask = RandomCrop3d(size)(VOLUME, NUMBERS.long())

        assert torch.equal(torch.stack([mask, -mask]).float(), volume)
        assert size == mask.shape
        first = [int(place[0]) for place in mask.nonzero(as_tuple=True)]
        last = [int(place[-1]) for place in (mask > 0).nonzero(as_tuple=True)]
        corner = tuple(np.unravel_index(int(mask[tuple(first)]) - 1, SHAPE))
        for place in itertools.product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
            source = tuple(c + p - f for c, p, f in zip(corner, place, first, strict=True))
            assert NUMBERS[source] == mask[place]
        assert math.prod(min(a, b) for a, b in zip(size, SHAPE, strict=True)) == int((mask > 0).sum())
        starts.add(corner)
    assert math.prod(max(n - s, 0) + 1 for n, s in zip(SHAPE, size, strict=True)) == len(starts)


def test_the_centre_is_cropped() -> None:
    volume, mask = CenterCrop3d((2, 5, 9))(VOLUME, NUMBERS)

    assert torch.equal(NUMBERS[1:3], mask[:, :, 1:7])
    assert 0 == mask[:, :, 0].abs().sum() + mask[:, :, 7:].abs().sum()
    assert torch.equal(mask, volume[0])


def test_flips_mirror_each_dimension_alone() -> None:
    torch.manual_seed(0)
    found: Counter[tuple[int, ...]] = Counter()
    flips = {
        axes: np.flip(NUMBERS.numpy(), axes) for count in range(4) for axes in itertools.combinations(range(3), count)
    }
    for _ in range(400):
        volume, mask = RandomFlip3d(0.5)(VOLUME, NUMBERS)
        (axes,) = [axes for axes, flipped in flips.items() if np.array_equal(flipped, mask.numpy())]
        found[axes] += 1

        assert torch.equal(torch.stack([mask, -mask]), volume)
    assert 8 == len(found)
    assert min(found.values()) > 25  # 50 on average, with a standard deviation of 6.6


def outcomes(transform: Any, count: int = 300) -> list[torch.Tensor]:
    torch.manual_seed(0)
    before, results = RANDOM.clone(), []
    for _ in range(count):
        volume, mask = transform(RANDOM, NUMBERS)

        assert mask is NUMBERS
        results.append(volume)
    assert torch.equal(before, RANDOM)
    return results


@pytest.mark.parametrize(
    "cls", [RandomBlur3d, RandomNoise3d, RandomBrightness3d, RandomContrast3d], ids=lambda cls: cls.__name__
)
def test_a_transform_acts_with_its_probability(cls: Any) -> None:
    acted = sum(volume is not RANDOM for volume in outcomes(cls()))

    assert 20 < acted < 70  # 45 of 300 on average, with a standard deviation of 6.2
    assert all(volume is not RANDOM for volume in outcomes(cls(1.0), 20))
    assert all(volume is RANDOM for volume in outcomes(cls(0.0), 20))
    with pytest.raises(ValueError, match=r"`p` must be in \[0, 1\], got 1.5"):
        cls(1.5)
    with pytest.raises(ValueError, match=r"must be at least 2, got 1"):
        cls(0.5, (2, 1))


def test_noise_has_the_drawn_deviation() -> None:
    noise = torch.stack([volume - RANDOM for volume in outcomes(RandomNoise3d(1.0, (0.1, 0.3)), 200)])
    deviations = noise.flatten(1).std(1)

    # The deviation of 240 numbers is known to 5%.
    assert deviations.min() > 0.08
    assert deviations.max() < 0.35
    assert abs(deviations.mean() - 0.2) < 0.02
    assert abs(noise.mean()) < 0.01


def test_brightness_and_contrast_multiply() -> None:
    factors = []
    for volume in outcomes(RandomBrightness3d(1.0), 50):
        factor = float(volume[0, 0, 0, 0] / RANDOM[0, 0, 0, 0])
        assert torch.allclose(factor * RANDOM, volume)
        factors.append(factor)
    assert 0.7 <= min(factors) < 0.75 < 1.25 < max(factors) <= 1.3
    for volume in outcomes(RandomContrast3d(1.0), 50):
        inner = RANDOM.abs().flatten().argsort()[20]  # small, so that it is not clamped
        factor = float(volume.flatten()[inner] / RANDOM.flatten()[inner])
        assert 0.65 - 1e-5 <= factor <= 1.5 + 1e-5
        for channel, source in zip(volume, RANDOM, strict=True):
            low, high = float(source.min()), float(source.max())
            expected = [min(max(factor * value, low), high) for value in source.flatten().tolist()]
            assert np.allclose(expected, channel.flatten(), atol=1e-5)


def test_blurs_have_the_drawn_deviation() -> None:
    impulse = torch.zeros(1, 21, 21, 21)
    impulse[0, 10, 10, 10] = 1
    torch.manual_seed(0)
    places = torch.arange(-10.0, 11)
    variances = []
    for _ in range(40):
        blurred, _ = RandomBlur3d(1.0)(impulse, NUMBERS)
        variances += [float((blurred[0].sum(dims) * places**2).sum()) for dims in ((1, 2), (0, 2), (0, 1))]
    # A sampled Gaussian of 0.5 has a deviation of 0.49.
    assert 0.48**2 < min(variances) < 0.7**2
    assert 1.3**2 < max(variances) < 1.5**2


def test_transforms_are_chained_by_torchvision() -> None:
    torch.manual_seed(0)
    volume, mask = v2.Compose([RandomCrop3d((2, 2, 2)), RandomFlip3d(), RandomBrightness3d(1.0)])(VOLUME, NUMBERS)

    assert torch.allclose(volume[0] / mask, volume[0, 0, 0, 0] / mask[0, 0, 0])
    assert (2, 2, 2) == mask.shape


@pytest.mark.parametrize("cls", [CenterCrop3d, RandomCrop3d])
def test_sizes_are_three_positive_numbers(cls: Any) -> None:
    for size in ((1, 2), (1, 2, 0)):
        with pytest.raises(ValueError, match="`size` must be three positive numbers, got"):
            cls(size)
