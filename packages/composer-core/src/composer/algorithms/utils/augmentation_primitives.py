"""Random augmentations of Pillow images, as in AutoAugment, and sets of them.

Each function takes an image and a `level` in [0, 10], where 10 is the strongest, and returns a new image. With
u ~ U(0.1, level), drawn for each image from the CPU generator of torch (seeded separately in each dataloader worker):

    autocontrast, equalize    the level is not used
    posterize                 keep 4 - int(4 u / 10) bits
    solarize                  invert values from 256 - int(256 u / 10) on
    rotate                    by int(30 u / 10) degrees, either way
    shear_x, shear_y          by 0.3 u / 10, either way
    translate_x, translate_y  by int(size / 3 * u / 10) pixels of the width or the height, either way
    color, contrast,          enhance by a factor from U(1, level) or U(1 - 0.09 level, 1), with equal probability;
    sharpness, brightness     a brightness factor above 1 is multiplied by 0.75
    color_original, ...       enhance by 1.8 u / 10 + 0.1

Pixels outside the original image become black. Rotation and shear use bilinear interpolation.

Source: Cubuk et al., "AutoAugment: Learning Augmentation Policies from Data", arXiv:1805.09501, table 6; Hendrycks et
al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", arXiv:1912.02781, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

AugmentationFn = Callable[["Image", float], "Image"]
"""A function of a PIL image and a level that returns a new image."""


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, device="cpu"))


def _intensity(level: float, strongest: float) -> float:
    return strongest * _uniform(0.1, level) / 10


def _either_way(value: float) -> float:
    return value if _uniform(0, 1) < 0.5 else -value


def _factor(level: float) -> float:
    return _uniform(1, level) if _uniform(0, 1) < 0.5 else _uniform(1 - 0.09 * level, 1)


def _original_factor(level: float) -> float:
    return _intensity(level, 1.8) + 0.1


def autocontrast(pil_img: Image, level: float = 0.0) -> Image:
    """Stretch the values of each channel to the full range."""
    from PIL import ImageOps

    return ImageOps.autocontrast(pil_img)


def equalize(pil_img: Image, level: float = 0.0) -> Image:
    """Spread the values of each channel evenly."""
    from PIL import ImageOps

    return ImageOps.equalize(pil_img)


def posterize(pil_img: Image, level: float = 0.0) -> Image:
    """Keep only the highest bits of each value."""
    from PIL import ImageOps

    return ImageOps.posterize(pil_img, 4 - int(_intensity(level, 4)))


def rotate(pil_img: Image, level: float = 0.0) -> Image:
    """Rotate the image around its center."""
    from PIL import Image

    degrees = _either_way(int(_intensity(level, 30)))
    return pil_img.rotate(degrees, resample=Image.Resampling.BILINEAR)


def solarize(pil_img: Image, level: float = 0.0) -> Image:
    """Invert the brightest values."""
    from PIL import ImageOps

    return ImageOps.solarize(pil_img, 256 - int(_intensity(level, 256)))


def shear_x(pil_img: Image, level: float = 0.0) -> Image:
    """Shift each row in proportion to its vertical position."""
    return _sheared(pil_img, (1, _either_way(_intensity(level, 0.3)), 0, 0, 1, 0))


def shear_y(pil_img: Image, level: float = 0.0) -> Image:
    """Shift each column in proportion to its horizontal position."""
    return _sheared(pil_img, (1, 0, 0, _either_way(_intensity(level, 0.3)), 1, 0))


def translate_x(pil_img: Image, level: float = 0.0) -> Image:
    """Move the image sideways."""
    return _translated(pil_img, _either_way(int(_intensity(level, pil_img.size[0] / 3))), 0)


def translate_y(pil_img: Image, level: float = 0.0) -> Image:
    """Move the image up or down."""
    return _translated(pil_img, 0, _either_way(int(_intensity(level, pil_img.size[1] / 3))))


def color(pil_img: Image, level: float = 0.0) -> Image:
    """Make colors stronger or weaker."""
    return _enhanced(pil_img, "Color", _factor(level))


def color_original(pil_img: Image, level: float = 0.0) -> Image:
    """Make colors stronger or weaker, with the factor of the AugMix authors."""
    return _enhanced(pil_img, "Color", _original_factor(level))


def contrast(pil_img: Image, level: float = 0.0) -> Image:
    """Move values away from their mean, or towards it."""
    return _enhanced(pil_img, "Contrast", _factor(level))


def contrast_original(pil_img: Image, level: float = 0.0) -> Image:
    """Change the contrast, with the factor of the AugMix authors."""
    return _enhanced(pil_img, "Contrast", _original_factor(level))


def brightness(pil_img: Image, level: float = 0.0) -> Image:
    """Make the image brighter or darker."""
    factor = _factor(level)
    return _enhanced(pil_img, "Brightness", 0.75 * factor if factor > 1 else factor)


def brightness_original(pil_img: Image, level: float = 0.0) -> Image:
    """Change the brightness, with the factor of the AugMix authors."""
    return _enhanced(pil_img, "Brightness", _original_factor(level))


def sharpness(pil_img: Image, level: float = 0.0) -> Image:
    """Sharpen or smooth the image."""
    return _enhanced(pil_img, "Sharpness", _factor(level))


def sharpness_original(pil_img: Image, level: float = 0.0) -> Image:
    """Sharpen or smooth the image, with the factor of the AugMix authors."""
    return _enhanced(pil_img, "Sharpness", _original_factor(level))


def _sheared(pil_img: Image, matrix: tuple[float, ...]) -> Image:
    from PIL import Image

    return pil_img.transform(pil_img.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


def _translated(pil_img: Image, x: float, y: float) -> Image:
    from PIL import Image

    # Offsets are integers: nearest is exact, and 40 times as fast as interpolation.
    return pil_img.transform(
        pil_img.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y), resample=Image.Resampling.NEAREST
    )


def _enhanced(pil_img: Image, quality: str, factor: float) -> Image:
    from PIL import ImageEnhance

    enhanced: Image = getattr(ImageEnhance, quality)(pil_img).enhance(factor)
    return enhanced


class _AugmentationSets(dict[str, list[AugmentationFn]]):
    def __missing__(self, name: object) -> list[AugmentationFn]:
        raise KeyError(f"`augmentation_set` must be one of {sorted(self)}, got {name!r}. 'all' is the largest.")


_GEOMETRIC_AND_TONAL: list[AugmentationFn] = [
    *(autocontrast, equalize, posterize, rotate, solarize),
    *(shear_x, shear_y, translate_x, translate_y),
]

augmentation_sets: dict[str, list[AugmentationFn]] = _AugmentationSets(
    all=[*_GEOMETRIC_AND_TONAL, color, contrast, brightness, sharpness],
    # Without augmentations that are among the corruptions of ImageNet-C and CIFAR-10-C.
    safe=[*_GEOMETRIC_AND_TONAL],
    original=[*_GEOMETRIC_AND_TONAL, color_original, contrast_original, brightness_original, sharpness_original],
)
"""Augmentations by the name of their set: "all", "safe" (without those of ImageNet-C and CIFAR-10-C) or "original"."""


def as_augmentation_set(augmentation_set: str | Sequence[AugmentationFn]) -> Sequence[AugmentationFn]:
    """Return the augmentation set with a given name; return a list of functions unchanged.

    Raises:
        KeyError: The name is unknown.
        ValueError: The list is empty.
    """
    if isinstance(augmentation_set, str):
        return augmentation_sets[augmentation_set]
    if not augmentation_set:
        raise ValueError("`augmentation_set` must hold at least one function, got none. Use for example 'all'.")
    return augmentation_set
