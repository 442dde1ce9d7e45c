"""Labeled images, stored on the training device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer.datasets import DeviceLoader, ImageTransform
from composer.devices import Device
from composer.recipes._recipe import Metric, check_at_least
from composer.utils import dist

CLASSIFICATION = (
    Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2),
    Metric("CrossEntropy", "cross entropy", higher_is_better=False),
)
_EVAL_BATCH_SIZE = 500


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images.

    Attributes:
        shift: The largest shift in each direction, in pixels.
        flip: Mirror images left to right.
        cutout: Side of the square that is cut out, in pixels; 0 for none.
        border: Padding mode of `ImageTransform`.
    """

    shift: int = 0
    flip: bool = False
    cutout: int = 0
    border: str = "constant"


@dataclass(frozen=True)
class ImageSet:
    """Images with a class per image or per pixel.

    Attributes:
        name: The dataset.
        train: Training images, shape (N, C, H, W), uint8, and targets, shape (N,), int64, or (N, H, W), uint8.
        test: Test images and targets.
        num_classes: Number of classes.
        batch_size: Images per training batch, summed over all processes.
        augmentation: Augmentation of the training images.
        validation: True if `test` has images held out from the training set, for choosing hyperparameters.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    num_classes: int
    batch_size: int
    augmentation: Augmentation
    validation: bool = False

    def __post_init__(self) -> None:
        size = min(self.shape[1:])
        if self.batch_size > self.num_train:
            raise ValueError(
                f"`batch_size` must be at most {self.num_train}, the number of training images, got {self.batch_size}."
            )
        if self.augmentation.shift >= size:
            raise ValueError(f"`shift` must be below {size}, the size of the images, got {self.augmentation.shift}.")
        per_process(self.batch_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train[0].shape[1:]
        return channels, height, width

    @property
    def num_train(self) -> int:
        """Number of training images."""
        return len(self.train[0])

    @property
    def num_test(self) -> int:
        """Number of test images."""
        return len(self.test[0])

    def describe(self) -> str:
        """Return one line about the dataset and its split."""
        channels, height, width = self.shape
        purpose = "validate" if self.validation else "test"
        return (
            f"{self.name}: {self.num_train:,} images to train on, {self.num_test:,} to {purpose}, "
            f"{channels}x{height}x{width} pixels, {self.num_classes} classes"
        )

    def loaders(self, seed: int, device: Device) -> tuple[DeviceLoader, DeviceLoader]:
        """Return loaders for training and testing on a device.

        Args:
            seed: Seed of the order and the augmentation of the training images.
            device: The device that stores all images.
        """
        mean, std = standardization(self.train[0])
        augmentation = self.augmentation
        augment = ImageTransform(
            flip=augmentation.flip,
            padding=augmentation.shift,
            padding_mode=augmentation.border,
            cutout=augmentation.cutout,
            mean=mean,
            std=std,
        )
        train = DeviceLoader(*self.train, per_process(self.batch_size), transform=augment, device=device, seed=seed)
        normalize = ImageTransform(mean=mean, std=std)
        eval_batch_size = max(1, _EVAL_BATCH_SIZE // dist.get_world_size())
        return train, DeviceLoader(*self.test, eval_batch_size, transform=normalize, device=device, shuffle=False)


def check_samples(options: Mapping[str, Any]) -> None:
    """Check the options of `Data` that all image recipes have.

    Args:
        options: The values by name; see `Data` in `composer.recipes.digits`.

    Raises:
        ValueError: A value is too small, or two options cannot be combined.
    """
    least = {"train_samples": 1, "test_samples": 1, "validation_samples": 1, "batch_size": 1, "shift": 0}
    for name, value in least.items():
        check_at_least(name, options[name], value)
    if options["test_samples"] is not None and options["validation_samples"] is not None:
        raise ValueError(
            "`test_samples` and `validation_samples` cannot be combined: validation samples replace the test set."
        )


def per_process(batch_size: int) -> int:
    """Return the batch size of each process.

    Raises:
        ValueError: It is not a multiple of the number of processes.
    """
    processes = dist.get_world_size()
    if batch_size % processes:
        raise ValueError(f"`batch_size` must be a multiple of the number of processes, {processes}, got {batch_size}.")
    return batch_size // processes


def first(name: str, count: int | None, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first images and their targets.

    Args:
        name: The option with their number, for the error message.
        count: Their number. None: all.
        images: All images.
        targets: All targets.

    Raises:
        ValueError: There are fewer images.
    """
    if count is not None and count > len(images):
        raise ValueError(f"`{name}` must be at most {len(images)}, the number of images, got {count}.")
    return images[:count], targets[:count]


def load_split(
    load: Callable[[Path, bool], tuple[Tensor, Tensor]], root: Path, count: int | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and targets to train on, and those to test on.

    Args:
        load: `load(root, is_train)` reads the training set or the test set.
        root: The folder.
        count: Split this many images off the end of the training set, for choosing hyperparameters, and test on them.
            None: the test set.

    Raises:
        ValueError: No image would remain.
    """
    images, targets = load(root, True)
    if count is None:
        return (images, targets), load(root, False)
    if count >= len(images):
        raise ValueError(f"`validation_samples` must be below {len(images)}, the number of images, got {count}.")
    return (images[:-count], targets[:-count]), (images[-count:], targets[-count:])


def standardization(images: Tensor) -> tuple[list[float], list[float]]:
    """Return the exact mean and standard deviation of each channel, computed from a histogram.

    Args:
        images: Shape (N, C, H, W), uint8.

    Returns:
        Both in 0 to 255. A deviation is at least 1, so that it can be a divisor also for constant images.
    """
    values = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.reshape(-1), minlength=256).double() / channel.numel()
        mean = share @ values
        means.append(float(mean))
        deviations.append(max(1.0, float((share @ (values - mean) ** 2).sqrt())))
    return means, deviations
