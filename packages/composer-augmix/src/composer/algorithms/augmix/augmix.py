"""The function, the dataset transform, and the algorithm. Symbols: m weighs the chains together, w[i] chain i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from PIL import Image

from composer.algorithms.utils import (
    AugmentationFn,
    add_training_transform,
    as_augmentation_set,
    augmentation_sets,
    check_targets_stay,
    check_training_transform,
)
from composer.algorithms.utils.augmentation_common import map_pillow_function
from composer.core import AUGMENTS_IMAGES, MIXES_AUGMENTATIONS, Algorithm, Event, Placement
from composer.utils import check_finite, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

T = TypeVar("T")


def augmix_image(
    img: T,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: str | Sequence[AugmentationFn] = augmentation_sets["all"],
) -> T:
    """Blend an image with `width` chains of random augmentations of it.

    With m ~ Beta(alpha, alpha) and w ~ Dirichlet(alpha, ..., alpha):
    `mixed = (1 - m) * img + m * sum(w[i] * chain[i](img))`. A chain applies `depth` augmentations, chosen uniformly
    with replacement, one after the other. Draws come from torch's CPU generator.

    Args:
        img: A Pillow image or a tensor of shape (H, W), (C, H, W) or (N, C, H, W), floating in [0, 1] or uint8; not
            modified. Each image of a batch is mixed separately.
        severity: The strength of each augmentation, in [0, 10].
        depth: The augmentations in a chain; if not positive, 1, 2 or 3, drawn for each chain.
        width: The number of chains, at least 1.
        alpha: Positive; small values leave most images nearly pure, or make them nearly one chain.
        augmentation_set: What is chosen from: functions of a Pillow image and a severity, or the name of one of
            `composer.algorithms.utils.augmentation_sets`.

    Returns:
        The same type as `img`, rounded to bytes; tensors keep shape, dtype and device.

    Raises:
        ValueError: `severity` is outside [0, 10], `width` is below 1, `alpha` is not positive, or the set is empty.
        KeyError: `augmentation_set` is an unknown name.
        TypeError: `img` is not an image.

    Example:
        >>> augmix_image(torch.rand(3, 32, 32), severity=5).shape
        torch.Size([3, 32, 32])

    Source: Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty",
        arXiv:1912.02781, section 3, algorithm 1.
    Differs: no consistency loss; the strength is drawn up to `severity`; the default set is the largest one.
    """
    _check(severity, depth, width, alpha)
    augmentations = as_augmentation_set(augmentation_set)

    def mix(image: Image.Image) -> Image.Image:
        weight, shares = _draw_weights(width, alpha)
        mixed = np.multiply(np.asarray(image), 1 - weight, dtype=np.float32)
        for share in shares:
            chain = _augmented(image, severity, depth, augmentations)
            mixed += np.multiply(np.asarray(chain), weight * share, dtype=np.float32)
        mixed += 0.5  # the conversion truncates
        return Image.frombytes(image.mode, image.size, mixed.astype(np.uint8).tobytes())

    return map_pillow_function(mix, img)


augment_and_mix = augmix_image  # the earlier name


class AugmentAndMixTransform(torch.nn.Module):
    """`augmix_image` as a transform of a dataset.

    Args:
        severity: The strength of each augmentation, in [0, 10].
        depth: The augmentations in a chain; if not positive, 1, 2 or 3, drawn for each chain.
        width: The number of chains, at least 1.
        alpha: Positive; the parameter of the weights' distributions.
        augmentation_set: "all", "safe", "original", or a list of functions.

    Raises:
        ValueError: `severity` is outside [0, 10], `width` is below 1, `alpha` is not positive, or the set is empty.
        KeyError: `augmentation_set` is an unknown name.

    Example:
        >>> AugmentAndMixTransform(severity=5)
        AugmentAndMixTransform(severity=5, depth=-1, width=3, alpha=1.0, augmentation_set='all')
    """

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: str | Sequence[AugmentationFn] = "all",
    ) -> None:
        super().__init__()
        _check(severity, depth, width, alpha)
        as_augmentation_set(augmentation_set)
        self.severity = plain_number(severity)
        self.depth, self.width = plain_number(depth), plain_number(width)
        self.alpha = plain_number(alpha)
        self.augmentation_set = augmentation_set

    def forward(self, img: T) -> T:
        """Return the mixed image, of the same type."""
        return augmix_image(img, self.severity, self.depth, self.width, self.alpha, self.augmentation_set)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return (
            f"severity={self.severity!r}, depth={self.depth!r}, width={self.width!r}, alpha={self.alpha!r}, "
            f"augmentation_set={self.augmentation_set!r}"
        )


_ADVICE = (
    "Or apply `AugmentAndMixTransform` in the dataset yourself, without `AugMix`. A "
    "`composer.datasets.DeviceLoader` takes `transform=composer.datasets.ImageTransform(...)` instead, which augments "
    "batches on the device."
)


class AugMix(Algorithm):
    """Blends each training image with several chains of random augmentations of it.

    At FIT_START an `AugmentAndMixTransform` is added to the transforms of the training dataset, before the one that
    converts images to tensors. It stays there; further calls of `fit` with the same algorithm add no second one. If the
    loader is known at INIT or BEFORE_LOAD and its dataset takes no transform, an error is raised there.

    **Events** INIT, BEFORE_LOAD, FIT_START, AFTER_DATALOADER (a check). **Reads** `state.train_dataloader`, or else
    `state.dataloader`; the batch. **Writes** the `transform` of its dataset; for a `Subset`, that of a copy of the
    dataset. **Cost** about `2 * width` operations
    of Pillow per image, or `depth * width`, in the workers of the loader. **Compilation** static: no shape
    changes.

    Args:
        severity: The strength of each augmentation, in [0, 10].
        depth: The augmentations in a chain; if not positive, 1, 2 or 3, drawn for each chain.
        width: The number of chains, at least 1.
        alpha: Positive; the parameter of the weights' distributions.
        augmentation_set: "all", "safe" (none of the corruptions of ImageNet-C and CIFAR-10-C) or "original" (the
            ranges of strength of the AugMix authors).

    Raises:
        ValueError: `severity` is outside [0, 10], `width` is below 1, or `alpha` is not positive; at the first batch,
            if it has a mask of its images, or boxes.
        KeyError: `augmentation_set` is an unknown name.

    Example:
        >>> AugMix(severity=5)
        AugMix(severity=5,depth=-1,width=3,alpha=1.0,augmentation_set='all')

    Source: Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty",
        arXiv:1912.02781, section 3, algorithm 1.
    Differs: no consistency loss; the strength is drawn up to `severity`; the default set is the largest one.
    """

    events = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_DATALOADER})
    placement = Placement(provides={MIXES_AUGMENTATIONS}, after={AUGMENTS_IMAGES})

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: str = "all",
    ) -> None:
        mix = self._transform = AugmentAndMixTransform(severity, depth, width, alpha, augmentation_set)
        self.severity, self.depth, self.width = mix.severity, mix.depth, mix.width
        self.alpha = mix.alpha
        self.augmentation_set = augmentation_set

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check the training loader, or add the transform to its dataset."""
        if event in (Event.INIT, Event.BEFORE_LOAD):
            check_training_transform(state, self._transform, _ADVICE)
        elif event is Event.AFTER_DATALOADER:
            check_targets_stay(state, "AugMix")
        else:
            add_training_transform(state, self._transform, _ADVICE)


def _check(severity: float, depth: int, width: int, alpha: float) -> None:
    check_finite("10 is the strongest.", severity=severity, least=0, most=10)
    check_finite(alpha=alpha)
    check_integers(depth=depth)
    check_integers("The paper uses 3 chains.", width=width, least=1)
    if alpha <= 0:
        raise ValueError(f"`alpha` must be positive and finite, got {alpha!r}. The paper uses 1.")


def _draw_weights(width: int, alpha: float) -> tuple[float, list[float]]:
    """Draw m and w. Shares of Gamma draws follow these distributions; torch.distributions uses the same sampler."""
    concentration = torch.full((2 + width,), alpha, dtype=torch.float64, device="cpu")
    first, second, *others = torch._standard_gamma(concentration).tolist()
    total = sum(others)
    return first / (first + second), [other / total for other in others]


def _augmented(image: Image.Image, severity: float, depth: int, augmentations: Sequence[AugmentationFn]) -> Image.Image:
    length = depth if depth > 0 else int(torch.randint(1, 4, (), device="cpu"))
    for choice in torch.randint(len(augmentations), (length,), device="cpu").tolist():
        image = augmentations[choice](image, severity)
    return image
