"""`randaugment_image` against its definition, and what it chooses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from composer import functional as cf
from composer.algorithms.randaugment import RandAugmentTransform, randaugment_image
from composer.algorithms.randaugment.randaugment import randaugment
from composer.algorithms.utils import augmentation_sets


def counting(names: list[str]) -> list[Callable[[Image.Image, float], Image.Image]]:
    """Augmentations that only note that they were called, and with which severity."""

    def augmentation(name: str) -> Callable[[Image.Image, float], Image.Image]:
        def augment(image: Image.Image, severity: float) -> Image.Image:
            names.append(f"{name}{severity}")
            return image

        return augment

    return [augmentation(name) for name in "abcd"]


def test_augmentations_follow_each_other(picture: Image.Image) -> None:
    def invert(image: Image.Image, severity: float) -> Image.Image:
        return ImageOps.invert(image)

    assert picture.tobytes() == randaugment_image(picture, depth=2, augmentation_set=[invert]).tobytes()
    expected = ImageOps.invert(picture).tobytes()
    assert expected == randaugment_image(picture, depth=3, augmentation_set=[invert]).tobytes()


def test_choices_are_uniform_with_replacement(picture: Image.Image) -> None:
    names: list[str] = []
    torch.manual_seed(1)
    for _ in range(2000):
        randaugment_image(picture, 7, 2, counting(names))

    # Each of 16 pairs is Binomial(2000, 1/16): mean 125, deviation 10.8; 5 deviations are allowed.
    pairs = list(zip(names[::2], names[1::2], strict=True))
    assert 2000 == len(pairs)
    assert all(abs(pairs.count((first, second)) - 125) < 55 for first in set(names) for second in set(names))
    assert {"a7", "b7", "c7", "d7"} == set(names)


def test_each_image_of_a_batch_has_its_own_augmentations() -> None:
    torch.manual_seed(2)
    images = torch.rand(3, 8, 8).expand(8, 3, 8, 8)
    changed = randaugment_image(images)

    assert 1 < len({image.numpy().tobytes() for image in changed})


def test_the_same_seed_gives_the_same_image_whatever_the_default_device_is(picture: Image.Image) -> None:
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            results.append(randaugment_image(picture).tobytes())

    assert results[0] == results[1] != picture.tobytes()


@pytest.mark.parametrize("name", ["all", "safe", "original"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pillow_images_stay_pillow_images(picture: Image.Image, name: str, mode: str) -> None:
    image = picture.convert(mode)
    before = image.tobytes()
    torch.manual_seed(4)
    for _ in range(50):
        changed = randaugment_image(image, severity=10, augmentation_set=augmentation_sets[name])
        assert (image.size, mode) == (changed.size, changed.mode)
    assert before == image.tobytes()


@pytest.mark.parametrize("shape", [(32, 32), (1, 32, 32), (3, 32, 32), (2, 3, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_keep_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    images = (torch.rand(shape) * (255 if dtype is torch.uint8 else 1)).to(dtype)
    before = images.clone()
    changed = randaugment_image(images)

    assert (shape, dtype) == (changed.shape, changed.dtype)
    assert torch.equal(before, images)


def test_no_augmentation_leaves_the_image(picture: Image.Image) -> None:
    assert picture.tobytes() == randaugment_image(picture, depth=0).tobytes()


def test_the_transform_does_the_same(picture: Image.Image) -> None:
    transform = pickle.loads(pickle.dumps(RandAugmentTransform(5, 3, "safe")))  # workers may get it pickled
    torch.manual_seed(6)
    expected = randaugment_image(picture, 5, 3, augmentation_sets["safe"])
    torch.manual_seed(6)

    assert expected.tobytes() == transform(picture).tobytes()
    assert "RandAugmentTransform(severity=5, depth=3, augmentation_set='safe')" == repr(transform)


def test_the_notebook_name_augments_or_makes_a_transform(picture: Image.Image) -> None:
    torch.manual_seed(7)
    expected = randaugment_image(picture, 5, 3).tobytes()
    results: list[Any] = []
    for augment in (lambda: randaugment(picture, 5, 3), lambda: randaugment(severity=5, depth=3)(picture)):
        torch.manual_seed(7)
        results.append(augment().tobytes())

    assert [expected, expected] == results
    assert isinstance(cf.randaugment(), RandAugmentTransform)
    assert cf.randaugment_image is randaugment_image


@pytest.mark.parametrize("make", [lambda **kwargs: randaugment_image(torch.rand(4, 4), **kwargs), RandAugmentTransform])
def test_invalid_arguments_are_refused(make: Callable[..., Any]) -> None:
    for severity in (-1, 10.5):
        with pytest.raises(ValueError, match=rf"`severity` must be in \[0, 10\], got {severity}. 10 is the strongest"):
            make(severity=severity)
    with pytest.raises(ValueError, match=r"`depth` must not be negative, got -1. Use 0 for no augmentation"):
        make(depth=-1)
    with pytest.raises(KeyError, match=r"`augmentation_set` must be one of .*, got 'some'"):
        make(augmentation_set="some")
    with pytest.raises(ValueError, match=r"`augmentation_set` must hold at least one function"):
        make(augmentation_set=[])


def test_the_module_is_not_hidden_by_the_function_of_its_name() -> None:
    import composer.algorithms.randaugment.randaugment as module

    assert module.randaugment is cf.randaugment
