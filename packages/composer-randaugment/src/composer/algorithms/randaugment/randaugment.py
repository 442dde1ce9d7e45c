"""The function, the transform, then the algorithm. The depth is the paper's N, the severity its M."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from composer.algorithms.utils import (
    AugmentationFn,
    add_training_transform,
    as_augmentation_set,
    augmentation_sets,
    check_targets_stay,
    check_training_transform,
)
from composer.algorithms.utils.augmentation_common import map_pillow_function
from composer.core import AUGMENTS_IMAGES, Algorithm, Event, Placement
from composer.utils import check_finite, check_integers, plain_number

if TYPE_CHECKING:
    from PIL.Image import Image

    from composer.core import State
    from composer.loggers import Logger

T = TypeVar("T")


def randaugment_image(
    img: T,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: str | Sequence[AugmentationFn] = augmentation_sets["all"],
) -> T:
    """Apply `depth` random augmentations to an image, one after the other, each with strength `severity`.

    Augmentations are drawn uniformly, with replacement, with the default CPU generator of torch.

    Args:
        img: A Pillow image or a tensor of shape (H, W), (C, H, W) or (N, C, H, W), floating in [0, 1] or uint8; not
            modified. Each image of a batch gets its own augmentations.
        severity: The strength of each augmentation, in [0, 10].
        depth: The number of augmentations, at least 0.
        augmentation_set: The augmentations to draw from: functions of a Pillow image and a severity, or a key of
            `composer.algorithms.utils.augmentation_sets`.

    Returns:
        The augmented image, of the same type; tensors keep shape, dtype and device.

    Raises:
        ValueError: `severity` is outside [0, 10], `depth` is negative, or the set is empty.
        KeyError: `augmentation_set` is not a known name.
        TypeError: `img` is not an image.

    Example:
        >>> randaugment_image(torch.rand(3, 32, 32), severity=5).shape
        torch.Size([3, 32, 32])

    Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
        arXiv:1909.13719, section 3.
    Differs: the identity is not among the augmentations; strengths are drawn up to `severity` instead of constant.
    """
    _check(severity, depth)
    augmentations = as_augmentation_set(augmentation_set)

    def augment(image: Image) -> Image:
        for choice in torch.randint(len(augmentations), (depth,), device="cpu").tolist():
            image = augmentations[choice](image, severity)
        return image

    return map_pillow_function(augment, img)


def randaugment(
    img: T | None = None,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: str | Sequence[AugmentationFn] = "all",
) -> T | RandAugmentTransform:
    """Augment an image with `randaugment_image`, or without an image return the equivalent transform."""
    transform = RandAugmentTransform(severity, depth, augmentation_set)
    return transform if img is None else transform(img)


class RandAugmentTransform(torch.nn.Module):
    """Dataset transform that calls `randaugment_image`.

    Args:
        severity: The strength of each augmentation, in [0, 10].
        depth: The number of augmentations, at least 0.
        augmentation_set: "all", "safe", "original", or a list of functions.

    Raises:
        ValueError: `severity` is outside [0, 10], `depth` is negative, or the set is empty.
        KeyError: `augmentation_set` is not a known name.

    Example:
        >>> RandAugmentTransform(severity=5)
        RandAugmentTransform(severity=5, depth=2, augmentation_set='all')
    """

    def __init__(
        self, severity: float = 9, depth: int = 2, augmentation_set: str | Sequence[AugmentationFn] = "all"
    ) -> None:
        super().__init__()
        _check(severity, depth)
        as_augmentation_set(augmentation_set)
        self.severity, self.depth = plain_number(severity), plain_number(depth)
        self.augmentation_set = augmentation_set

    def forward(self, img: T) -> T:
        """Return the augmented image, of the same type."""
        return randaugment_image(img, self.severity, self.depth, self.augmentation_set)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"severity={self.severity!r}, depth={self.depth!r}, augmentation_set={self.augmentation_set!r}"


_ADVICE = (
    "Or apply `RandAugmentTransform` where the images are read, without `RandAugment`. A "
    "`composer.datasets.DeviceLoader` takes `transform=composer.datasets.ImageTransform(...)` instead, which augments "
    "batches on the device."
)


class RandAugment(Algorithm):
    """Applies a few random augmentations of one strength to each training image.

    At FIT_START a `RandAugmentTransform` is added to the transforms of the training dataset, before the conversion to
    tensors. It stays there; further calls of `fit` with the same algorithm add nothing. A dataloader without such a
    dataset is refused at INIT or BEFORE_LOAD if it is known by then.

    **Events** INIT, BEFORE_LOAD, FIT_START, AFTER_DATALOADER (a check). **Reads** `state.train_dataloader`, or else
    `state.dataloader`; the batch. **Writes** the `transform` of its dataset, or of a copy of the dataset inside a
    `Subset`. **Cost** `depth` Pillow operations per image, in the workers of the dataloader. **Compilation** static:
    the model and the shapes do not change.

    Args:
        severity: The strength of each augmentation, in [0, 10].
        depth: The number of augmentations, at least 0.
        augmentation_set: "all", "safe" (none of the corruptions of ImageNet-C and CIFAR-10-C) or "original" (the ranges
            of strength of the AugMix authors).

    Raises:
        ValueError: `severity` is outside [0, 10] or `depth` is negative; at the first batch, if it has a mask of its
            images, or boxes.
        KeyError: `augmentation_set` is not a known name.

    Example:
        >>> RandAugment(severity=5)
        RandAugment(severity=5,depth=2,augmentation_set='all')

    Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
        arXiv:1909.13719, section 3.
    Differs: the identity is not among the augmentations; strengths are drawn up to `severity` instead of constant.
    """

    events = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_DATALOADER})
    placement = Placement(provides={AUGMENTS_IMAGES})

    def __init__(self, severity: float = 9, depth: int = 2, augmentation_set: str = "all") -> None:
        self._transform = RandAugmentTransform(severity, depth, augmentation_set)
        self.severity, self.depth = plain_number(severity), plain_number(depth)
        self.augmentation_set = augmentation_set

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check the training dataloader, or add the transform to its dataset."""
        if event in (Event.INIT, Event.BEFORE_LOAD):
            check_training_transform(state, self._transform, _ADVICE)
        elif event is Event.AFTER_DATALOADER:
            check_targets_stay(state, "RandAugment")
        else:
            add_training_transform(state, self._transform, _ADVICE)


def _check(severity: float, depth: int) -> None:
    check_finite("10 is the strongest.", severity=severity, least=0, most=10)
    check_integers("Use 0 for no augmentation.", depth=depth, least=0)
