"""`augmix_image` against its definition, and the distributions of its draws."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from composer import functional as cf
from composer.algorithms.augmix import AugmentAndMixTransform, augment_and_mix, augmix_image
from composer.algorithms.augmix import augmix as module
from composer.algorithms.utils import augmentation_sets


def invert(image: Image.Image, severity: float) -> Image.Image:
    return ImageOps.invert(image)


def mirror(image: Image.Image, severity: float) -> Image.Image:
    return ImageOps.mirror(image)


def black(image: Image.Image, severity: float) -> Image.Image:
    return Image.new(image.mode, image.size)


def test_the_image_is_blended_with_its_chains(picture: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_draw_weights", lambda width, alpha: (0.6, [0.25, 0.75]))
    chains = iter([mirror(picture, 0), invert(picture, 0)])
    monkeypatch.setattr(module, "_augmented", lambda *args: next(chains))
    mixed = augmix_image(picture, width=2)

    image = np.asarray(picture, dtype=np.float64)
    expected = 0.4 * image + 0.6 * (0.25 * image[:, ::-1] + 0.75 * (255 - image))
    assert np.abs(expected - np.asarray(mixed)).max() <= 0.501


@pytest.mark.parametrize("width", [1, 3])
def test_chains_that_change_nothing_leave_the_image_exactly(picture: Image.Image, width: int) -> None:
    """Cutting off instead of rounding makes about half of the values one smaller."""
    for _ in range(20):
        mixed = augmix_image(picture, width=width, augmentation_set=[lambda image, severity: image])
        assert picture.tobytes() == mixed.tobytes()


def count_augmentations(depth: int, width: int) -> list[int]:
    """The number of augmentations in 600 images, each."""
    calls: list[float] = []

    def note(image: Image.Image, severity: float) -> Image.Image:
        calls.append(severity)
        return image

    counts, image = [], Image.new("L", (2, 2))
    for _ in range(600):
        calls.clear()
        augmix_image(image, 7, depth, width, augmentation_set=[note])
        assert {7} == set(calls)
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("depth", [0, -1])
def test_the_depth_of_a_chain_is_drawn(depth: int) -> None:
    torch.manual_seed(1)
    counts = count_augmentations(depth, 1)

    # Each of 1, 2 and 3 is Binomial(600, 1/3): mean 200, deviation 11.5; 5 deviations are allowed.
    assert {1, 2, 3} == set(counts)
    assert all(abs(counts.count(length) - 200) < 58 for length in (1, 2, 3))
    assert {3, 4, 5, 6, 7, 8, 9} == set(count_augmentations(depth, 3))


def test_a_given_depth_is_kept() -> None:
    assert {8} == set(count_augmentations(2, 4))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 5.0])
def test_weights_follow_their_distributions(alpha: float) -> None:
    torch.manual_seed(2)
    drawn = [module._draw_weights(3, alpha) for _ in range(20_000)]
    weights = torch.tensor([weight for weight, _ in drawn], dtype=torch.float64)
    shares = torch.tensor([share for _, share in drawn], dtype=torch.float64)

    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)); of 3, Dirichlet has means 1/3, variances 2 / (9 (3a + 1)).
    # 20,000 draws of squares of at most 1/4 or 4/9: standard errors below 0.0018 and 0.0032; 5 of them are allowed.
    assert abs(float((weights - 0.5).square().mean()) - 1 / (4 * (2 * alpha + 1))) < 0.009
    assert float(((shares - 1 / 3).square().mean(0) - 2 / (9 * (3 * alpha + 1))).abs().max()) < 0.016
    # Means: deviations of at most 0.4, so standard errors below 0.0029.
    assert abs(float(weights.mean()) - 0.5) < 0.0145
    assert float((shares.mean(0) - 1 / 3).abs().max()) < 0.0145
    torch.testing.assert_close(torch.ones(20_000, dtype=torch.float64), shares.sum(1))


def test_the_weight_of_the_chains_is_that_of_the_image_turned_around() -> None:
    """A white image with a black chain shows 255 (1 - m), for m uniform."""
    torch.manual_seed(3)
    white = Image.new("L", (1, 1), 255)
    values = torch.tensor([augmix_image(white, augmentation_set=[black]).getpixel((0, 0)) for _ in range(4000)]) / 255.0

    # U(0, 1): mean 1/2, deviation 0.289, standard error 0.0046.
    assert abs(float(values.mean()) - 0.5) < 0.023
    assert abs(float((values < 0.1).float().mean()) - 0.1) < 0.03


def test_each_image_of_a_batch_draws_its_own() -> None:
    torch.manual_seed(2)
    images = torch.rand(3, 8, 8).expand(8, 3, 8, 8)

    assert 8 == len({image.numpy().tobytes() for image in augmix_image(images, severity=10)})


def test_the_same_seed_gives_the_same_image_whatever_the_default_device_is(picture: Image.Image) -> None:
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            results.append(augmix_image(picture).tobytes())

    assert results[0] == results[1] != picture.tobytes()


@pytest.mark.parametrize("name", ["all", "safe", "original"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pillow_images_stay_pillow_images(picture: Image.Image, name: str, mode: str) -> None:
    image = picture.convert(mode)
    before = image.tobytes()
    torch.manual_seed(4)
    for _ in range(20):
        mixed = augmix_image(image, severity=10, augmentation_set=augmentation_sets[name])
        assert (image.size, mode) == (mixed.size, mixed.mode)
    assert before == image.tobytes()


@pytest.mark.parametrize("shape", [(32, 32), (1, 32, 32), (3, 32, 32), (2, 3, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_keep_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    images = (torch.rand(shape) * (255 if dtype is torch.uint8 else 1)).to(dtype)
    before = images.clone()
    mixed = augmix_image(images)

    assert (shape, dtype) == (mixed.shape, mixed.dtype)
    assert torch.equal(before, images)


def test_the_transform_and_the_earlier_name_do_the_same(picture: Image.Image) -> None:
    transform = pickle.loads(pickle.dumps(AugmentAndMixTransform(5, 2, 4, 0.5, "safe")))  # workers may get it pickled
    arguments = (5, 2, 4, 0.5, augmentation_sets["safe"])
    results: list[Any] = []
    for mix in (
        transform,
        lambda image: augmix_image(image, *arguments),
        lambda image: augment_and_mix(image, *arguments),
    ):
        torch.manual_seed(6)
        results.append(mix(picture).tobytes())

    assert results[0] == results[1] == results[2]
    expected = "AugmentAndMixTransform(severity=5, depth=2, width=4, alpha=0.5, augmentation_set='safe')"
    assert expected == repr(transform)
    assert (cf.augmix_image, cf.augment_and_mix) == (augmix_image, augment_and_mix)


@pytest.mark.parametrize("make", [lambda **kwargs: augmix_image(torch.rand(4, 4), **kwargs), AugmentAndMixTransform])
def test_invalid_arguments_are_refused(make: Callable[..., Any]) -> None:
    for severity in (-1, 10.5):
        with pytest.raises(ValueError, match=rf"`severity` must be in \[0, 10\], got {severity}. 10 is the strongest"):
            make(severity=severity)
    with pytest.raises(ValueError, match=r"`width` must be at least 1, got 0. The paper uses 3 chains"):
        make(width=0)
    for alpha in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"`alpha` must be (positive and )?finite, got {alpha}\."):
            make(alpha=alpha)
    with pytest.raises(KeyError, match=r"`augmentation_set` must be one of .*, got 'some'"):
        make(augmentation_set="some")
    with pytest.raises(ValueError, match=r"`augmentation_set` must hold at least one function"):
        make(augmentation_set=[])
