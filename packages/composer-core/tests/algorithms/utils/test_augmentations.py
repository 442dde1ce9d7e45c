"""Augmentations of images, against Pillow and torchvision."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import functional as TF

from composer.algorithms import utils
from composer.algorithms.utils import as_augmentation_set, augmentation_common, augmentation_primitives
from composer.algorithms.utils import augmentation_sets as sets
from composer.algorithms.utils.augmentation_common import image_as_type, is_pillow_image, map_pillow_function
from composer.utils import MissingConditionalImportError

BILINEAR, AFFINE = Image.Resampling.BILINEAR, Image.Transform.AFFINE
FIRST_NINE = "autocontrast equalize posterize rotate solarize shear_x shear_y translate_x translate_y".split()
LAST_FOUR = "color contrast brightness sharpness".split()


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    values = np.random.default_rng(0).integers(30, 220, (size[1], size[0], 4), dtype=np.uint8)
    values[..., 0] = np.linspace(40, 200, size[0])
    return Image.fromarray(values).convert(mode)


def same(first: Image.Image, second: Image.Image) -> bool:
    return first.mode == second.mode and first.size == second.size and first.tobytes() == second.tobytes()


def test_importing_needs_neither_pillow_nor_torchvision() -> None:
    program = """
import sys
for name in ("PIL", "torchvision"):
    sys.modules[name] = None
import composer, composer.algorithms
from composer.algorithms import utils
from composer.algorithms.utils import augmentation_common, augmentation_primitives
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- image_as_type and map_pillow_function


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "1"])
def test_a_pillow_image_becomes_the_tensor_that_torchvision_makes(mode: str) -> None:
    image = picture(mode)
    tensor = image_as_type(image, torch.Tensor)

    assert torch.equal(TF.to_tensor(image), tensor)
    assert mode == "1" or same(image, image_as_type(tensor, Image.Image))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_every_byte_survives_the_way_there_and_back(dtype: torch.dtype) -> None:
    """Cutting floats off instead of rounding them loses one in float16."""
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    tensor = values if dtype is torch.uint8 else values.to(dtype) / 255

    assert values.flatten().tolist() == list(image_as_type(tensor, Image.Image).tobytes())
    assert torch.equal(tensor, map_pillow_function(lambda image: image, tensor))


def test_images_of_the_requested_type_are_returned_unchanged() -> None:
    image, batch = picture(), torch.zeros(2, 3, 4, 4)

    assert image_as_type(image, Image.Image) is image
    assert image_as_type(batch, torch.Tensor) is batch


def test_values_outside_0_and_1_are_clamped() -> None:
    image = image_as_type(torch.tensor([[-0.5, 0.5, 1.5]]), Image.Image)

    assert [0, 128, 255] == list(image.tobytes())


@pytest.mark.parametrize("shape", [(6, 8), (1, 6, 8), (3, 6, 8), (2, 3, 6, 8), (2, 1, 6, 8), (0, 3, 6, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_keep_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    images = (torch.rand(shape) * 255).to(dtype) if dtype is torch.uint8 else torch.rand(shape).to(dtype)
    before = images.clone()
    result = map_pillow_function(ImageOps.mirror, images)

    assert (shape, dtype) == (result.shape, result.dtype)
    torch.testing.assert_close(before.flip(-1), result, atol=0 if dtype is torch.uint8 else 1 / 255, rtol=0)
    assert torch.equal(before, images)


def test_several_images_become_a_list() -> None:
    first, second = picture(), torch.rand(3, 4, 4)
    result: Any = map_pillow_function(ImageOps.mirror, (first, second))

    assert same(ImageOps.mirror(first), result[0])
    torch.testing.assert_close(second.flip(-1), result[1], atol=1 / 255, rtol=0)
    assert isinstance(result, list)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a tensor or a Pillow image .* got Image and <class 'str'>"):
        image_as_type(picture(), str)
    with pytest.raises(TypeError, match=r"a tensor or a Pillow image .* got list and <class 'torch.Tensor'>"):
        image_as_type([1], torch.Tensor)
    with pytest.raises(TypeError, match=r"`imgs` must be a Pillow image, a tensor or an iterable of these, got int"):
        map_pillow_function(ImageOps.mirror, [1])
    with pytest.raises(TypeError, match=r"got str"):
        map_pillow_function(ImageOps.mirror, "image")


@pytest.mark.parametrize("shape", [(8,), (5, 8, 8), (2, 3, 8, 8)])
def test_tensors_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(H, W\) or \(C, H, W\) with 1 to 4 channels, got"):
        image_as_type(torch.zeros(shape), Image.Image)


def test_tensors_of_other_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`image` must be floating or uint8, got torch.int64"):
        image_as_type(torch.zeros(4, 4, dtype=torch.int64), Image.Image)


def test_without_pillow_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingConditionalImportError, match=r"pip install pillow"):
        map_pillow_function(ImageOps.mirror, torch.zeros(3, 4, 4))


def test_pillow_images_are_recognised_without_importing_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_pillow_image(picture())
    assert not is_pillow_image(torch.zeros(4, 4))
    monkeypatch.delitem(sys.modules, "PIL.Image")
    assert not is_pillow_image(object())
    assert "PIL.Image" not in sys.modules


# ---- the primitives


def enhanced(quality: str) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: getattr(ImageEnhance, quality)(image).enhance(factor)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, AFFINE, matrix, resample=BILINEAR)


def expected_of(name: str, image: Image.Image, level: float, draw: Iterator[float]) -> Image.Image:
    """Return the expected result of `name` for the numbers in [0, 1) that it draws."""
    if name in ("autocontrast", "equalize"):
        return getattr(ImageOps, name)(image)  # type: ignore[no-any-return]
    if name in LAST_FOUR:
        low, high = (1.0, level) if next(draw) < 0.5 else (1 - 0.09 * level, 1.0)
        factor = low + (high - low) * next(draw)
        return enhanced(name.title())(image, factor * (0.75 if name == "brightness" and factor > 1 else 1))
    u = 0.1 + (level - 0.1) * next(draw)
    if name.endswith("_original"):
        return enhanced(name.removesuffix("_original").title())(image, 1.8 * u / 10 + 0.1)
    if name == "posterize":
        return ImageOps.posterize(image, 4 - int(4 * u / 10))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(256 * u / 10))
    sign = 1 if next(draw) < 0.5 else -1
    return {
        "rotate": lambda: image.rotate(sign * int(30 * u / 10), resample=BILINEAR),
        "shear_x": lambda: affine(image, 1, sign * 0.3 * u / 10, 0, 0, 1, 0),
        "shear_y": lambda: affine(image, 1, 0, 0, sign * 0.3 * u / 10, 1, 0),
        "translate_x": lambda: affine(image, 1, 0, sign * int(image.width / 3 * u / 10), 0, 1, 0),
        "translate_y": lambda: affine(image, 1, 0, 0, 0, 1, sign * int(image.height / 3 * u / 10)),
    }[name]()


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", [*FIRST_NINE, *LAST_FOUR, *(f"{name}_original" for name in LAST_FOUR)])
def test_each_primitive_follows_its_rule(name: str, mode: str) -> None:
    image = picture(mode)
    before = image.copy()
    for seed in range(40):
        level = seed / 4
        numbers = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
        expected = expected_of(name, image, level, iter(numbers))
        torch.manual_seed(seed)
        actual = getattr(augmentation_primitives, name)(image, level)

        assert same(expected, actual), (seed, level)
    assert same(before, image)


def test_the_level_may_be_left_out() -> None:
    for name in sets:
        assert {(40, 24)} == {augment(picture()).size for augment in sets[name]}  # type: ignore[call-arg]


def test_what_is_drawn_is_uniform() -> None:
    torch.manual_seed(5)
    u = torch.tensor([augmentation_primitives._intensity(9, 10) for _ in range(4000)])
    factors = torch.tensor([augmentation_primitives._factor(9) for _ in range(4000)])
    above = factors[factors > 1]

    # U(0.1, 9) has mean 4.55 and deviation 2.57: a standard error of 0.041 for 4,000 draws; 5 of them are allowed.
    assert abs(float(u.mean()) - 4.55) < 0.2
    assert 0.1 <= float(u.min()) < 0.2
    assert 8.9 < float(u.max()) <= 9
    # The number above 1 is Binomial(4000, 1/2), deviation 32; U(1, 9) has mean 5, standard error 0.052 for 2,000.
    assert abs(len(above) - 2000) < 160
    assert abs(float(above.mean()) - 5) < 0.3
    assert float(factors.min()) >= 1 - 0.81


def test_draws_come_from_the_host_whatever_the_default_device_is() -> None:
    image = picture()
    torch.manual_seed(4)
    expected = augmentation_primitives.rotate(image, 9)
    torch.manual_seed(4)
    with torch.device("meta"):
        actual = augmentation_primitives.rotate(image, 9)

    assert same(expected, actual)


def test_the_sets_are_what_they_were() -> None:
    names = {name: [augment.__name__ for augment in sets[name]] for name in sets}

    assert {
        "all": [*FIRST_NINE, *LAST_FOUR],
        "safe": FIRST_NINE,
        "original": [*FIRST_NINE, *(f"{name}_original" for name in LAST_FOUR)],
    } == names
    assert utils.augmentation_sets is augmentation_primitives.augmentation_sets


def test_a_set_is_known_by_its_name_or_given() -> None:
    assert as_augmentation_set("safe") is sets["safe"]
    own = [augmentation_primitives.rotate]
    assert as_augmentation_set(own) is own


def test_an_unknown_or_empty_set_is_refused() -> None:
    with pytest.raises(KeyError, match=r"must be one of \['all', 'original', 'safe'\], got 'some'"):
        sets["some"]
    with pytest.raises(ValueError, match=r"`augmentation_set` must hold at least one function, got none"):
        as_augmentation_set([])


def test_the_modules_have_the_names_that_code_imports() -> None:
    assert augmentation_common.image_as_type is image_as_type
    assert augmentation_primitives.AugmentationFn is utils.AugmentationFn
