"""Synthetic data of any shape, identical in every run: for tests, benchmarks and first steps without files.

Each class has its own pattern, and a sample is the pattern of its class plus noise, so that a model can learn it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer.datasets.sampler import derived_seed
from composer.datasets.utils import pil_image
from composer.utils import check_finite

_PATTERN, _NOISE = 0, 1  # random streams derived from a seed


def synthetic_images(
    num_samples: int, shape: tuple[int, int, int], num_classes: int, *, is_train: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return uint8 images and their labels.

    Args:
        num_samples: Number of images.
        shape: Channels, height and width.
        num_classes: Number of classes; the class of sample i is `i % num_classes`.
        is_train: Training images and test images have the same patterns and different noise.
        seed: Seed of patterns and noise.

    Returns:
        Images of shape (num_samples, *shape), uint8, and labels of shape (num_samples,), int64.

    Raises:
        ValueError: `num_samples`, `num_classes` or a size is not positive.

    Example:
        >>> images, labels = synthetic_images(4, (3, 8, 8), num_classes=3)
        >>> images.shape, images.dtype, labels
        (torch.Size([4, 3, 8, 8]), torch.uint8, tensor([0, 1, 2, 0]))
    """
    check_finite(num_samples=num_samples, num_classes=num_classes, size=min(shape), above=0)
    patterns = torch.randint(64, 192, (num_classes, *shape), generator=_generator(seed, _PATTERN), dtype=torch.uint8)
    labels = torch.arange(num_samples) % num_classes
    noise = torch.randint(
        0, 64, (num_samples, *shape), generator=_generator(seed, _NOISE, int(is_train)), dtype=torch.uint8
    )
    return noise.add_(patterns[labels]), labels


def synthetic_text(num_tokens: int, vocab_size: int, *, is_train: bool = True, seed: int = 0) -> Tensor:
    """Return tokens in which the successor of token t is t + 1 with probability 0.9, otherwise a random token.

    Args:
        num_tokens: Number of tokens.
        vocab_size: Tokens are in [0, vocab_size).
        is_train: Training text and test text have different noise.
        seed: Seed of the noise.

    Returns:
        Shape (num_tokens,), int64.

    Raises:
        ValueError: `num_tokens` or `vocab_size` is not positive.
    """
    check_finite(num_tokens=num_tokens, vocab_size=vocab_size, above=0)
    generator = _generator(seed, _NOISE, int(is_train))
    jumps = torch.randint(vocab_size, (num_tokens,), generator=generator)
    steps = torch.where(torch.rand(num_tokens, generator=generator) < 0.9, 1, jumps)
    return steps.cumsum(0) % vocab_size


class _Repeated(Dataset[Any]):
    """Dataset of `size` samples, of which `unique` are in memory and repeat."""

    def __init__(self, size: int, num_unique: int | None, most: int = 1000) -> None:
        check_finite(size=size, above=0)
        if num_unique is not None:
            check_finite(num_unique=num_unique, above=0)
        self._size, self._unique = size, min(size, most if num_unique is None else num_unique)

    def __len__(self) -> int:
        return self._size

    def _place(self, index: int) -> int:
        if not 0 <= index < self._size:  # otherwise a plain `for` over the samples would not end
            raise IndexError(f"`index` must be from 0 to {self._size - 1}, got {index!r}.")
        return index % self._unique


class SyntheticImageDataset(_Repeated):
    """Dataset of labeled images; see `synthetic_images`.

    Args:
        size: Number of samples.
        shape: Channels, height and width.
        num_classes: Number of classes.
        num_unique: Number of different samples in memory, which repeat. None: `size`, at most 1000.
        transform: Applied to each image, a uint8 tensor, or a Pillow image if `as_pil`.
        as_pil: Return Pillow images.
        is_train: Training images and test images have the same patterns and different noise.
        seed: Seed of the samples.

    Attributes:
        transform: May be replaced.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> dataset = SyntheticImageDataset(size=100, shape=(3, 16, 16), num_classes=10)
        >>> image, label = dataset[42]
        >>> image.shape, label
        (torch.Size([3, 16, 16]), 2)
    """

    def __init__(
        self,
        size: int,
        shape: tuple[int, int, int] = (3, 32, 32),
        num_classes: int = 10,
        *,
        num_unique: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        as_pil: bool = False,
        is_train: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(size, num_unique)
        self.transform, self._as_pil = transform, as_pil
        self._images, self._labels = synthetic_images(self._unique, shape, num_classes, is_train=is_train, seed=seed)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = self._place(index)
        image: Any = pil_image(self._images[place]) if self._as_pil else self._images[place]
        return image if self.transform is None else self.transform(image), int(self._labels[place])


class SyntheticSegmentationDataset(_Repeated):
    """Dataset of images with a class for each pixel: four rectangles in the colors of their classes.

    Args:
        size: Number of samples.
        shape: Channels, height and width.
        num_classes: Number of classes.
        num_unique: Number of different samples in memory, which repeat. None: `size`, at most 1000.
        transforms: `(image, mask) -> (image, mask)`.
        as_pil: Use Pillow images in place of tensors.
        is_train: Training and test samples have the same colors and different rectangles.
        seed: Seed of the samples.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> image, mask = SyntheticSegmentationDataset(size=10, shape=(3, 16, 16), num_classes=4)[3]
        >>> image.shape, mask.shape, mask.dtype
        (torch.Size([3, 16, 16]), torch.Size([16, 16]), torch.uint8)
    """

    def __init__(
        self,
        size: int,
        shape: tuple[int, int, int] = (3, 64, 64),
        num_classes: int = 4,
        *,
        num_unique: int | None = None,
        transforms: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        as_pil: bool = False,
        is_train: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(size, num_unique)
        self.transforms, self._as_pil = transforms, as_pil
        unique, (channels, height, width) = self._unique, shape
        check_finite(num_classes=num_classes, size=min(shape), above=0)
        colors = torch.randint(64, 192, (num_classes, channels), generator=_generator(seed, _PATTERN))
        generator = _generator(seed, _NOISE, int(is_train))
        self._masks = torch.zeros(unique, height, width, dtype=torch.uint8)
        for mask in self._masks:
            for label in torch.randint(num_classes, (4,), generator=generator).tolist():
                top, bottom = torch.randint(height + 1, (2,), generator=generator).sort().values.tolist()
                left, right = torch.randint(width + 1, (2,), generator=generator).sort().values.tolist()
                mask[top:bottom, left:right] = label
        noise = torch.randint(64, (unique, *shape), generator=generator)
        self._images = (colors[self._masks.long()].permute(0, 3, 1, 2) + noise).to(torch.uint8)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        place = self._place(index)
        image: Any = self._images[place]
        mask: Any = self._masks[place]
        if self._as_pil:
            image, mask = pil_image(image), pil_image(mask[None])
        return (image, mask) if self.transforms is None else self.transforms(image, mask)


class SyntheticVolumeDataset(_Repeated):
    """Dataset of volumes with a class for each voxel: a ball that is brighter than the noise around it.

    Args:
        size: Number of samples.
        shape: Channels, depth, height and width.
        num_classes: Number of classes; 0 is the background.
        num_unique: Number of different samples in memory, which repeat. None: `size`, at most 8.
        is_train: Training and test samples have different balls.
        seed: Seed of the samples.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> volume, mask = SyntheticVolumeDataset(size=2, shape=(4, 8, 8, 8))[0]
        >>> volume.shape, mask.shape
        (torch.Size([4, 8, 8, 8]), torch.Size([8, 8, 8]))
    """

    def __init__(
        self,
        size: int,
        shape: tuple[int, int, int, int] = (4, 32, 32, 32),
        num_classes: int = 4,
        *,
        num_unique: int | None = None,
        is_train: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(size, num_unique, most=8)
        unique = self._unique
        check_finite(num_classes=num_classes, size=min(shape), above=0)
        generator = _generator(seed, _NOISE, int(is_train))
        grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, n) for n in shape[1:]), indexing="ij"))
        centers = torch.rand(unique, 3, 1, 1, 1, generator=generator) - 0.5
        inside = (grid - centers).square().sum(1) < 0.25
        labels = torch.arange(unique).view(-1, 1, 1, 1) % max(num_classes - 1, 1) + 1
        self._masks = torch.where(inside, labels, 0) % num_classes
        self._volumes = torch.randn(unique, *shape, generator=generator) + self._masks[:, None]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = self._place(index)
        return self._volumes[place], self._masks[place]


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(*parts))
