"""Labelled images that lie on the training device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer.datasets import DeviceLoader, ImageTransform
from composer.devices import Device
from composer.recipes._hparams import check_at_least
from composer.recipes._parts import Metric
from composer.utils import dist

__all__ = [
    "CLASSIFICATION",
    "Augmentation",
    "ImageSet",
    "check_samples",
    "first",
    "hold_out",
    "per_process",
    "standardization",
]

CLASSIFICATION = (
    Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2),
    Metric("CrossEntropy", "cross entropy", higher_is_better=False),
)
_EVAL_BATCH = 500


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied, each at random on its own.

    Attributes:
        shift: Pixels by which they are moved at most, in each direction.
        flip: Whether they are mirrored.
        cutout: Side of the square that is cut out, in pixels; 0 for none.
        border: What comes in at the border: a padding mode of `ImageTransform`.
    """

    shift: int = 0
    flip: bool = False
    cutout: int = 0
    border: str = "constant"


@dataclass(frozen=True)
class ImageSet:
    """Images with a class each, or a class for each pixel.

    Attributes:
        name: The data set.
        train: Training images, shape (N, C, H, W), uint8, and targets, shape (N,), int64, or (N, H, W), uint8.
        test: Test images and targets.
        num_classes: Number of classes.
        batch_size: Images per training batch, of all processes together.
        augmentation: Of the training images.
        validation: Whether `test` is not the test set, but images held out for choosing hyperparameters.
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
                f"`batch_size` must not be above the number of training images, {self.num_train}, got "
                f"{self.batch_size}."
            )
        if self.augmentation.shift >= size:
            raise ValueError(
                f"`shift` must be from 0 to below the size of the images, {size}, got {self.augmentation.shift}."
            )
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
        """The data set and its split, in a line."""
        channels, height, width = self.shape
        purpose = "validate" if self.validation else "test"
        return (
            f"{self.name}: {self.num_train:,} images to train on, {self.num_test:,} to {purpose}, "
            f"{channels}x{height}x{width} pixels, {self.num_classes} classes"
        )

    def facts(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        how = self.augmentation
        return {
            "name": self.name,
            "train_images": self.num_train,
            "test_images": self.num_test,
            "validation": self.validation,
            "shape": list(self.shape),
            "num_classes": self.num_classes,
            "shift": how.shift,
            "flip": how.flip,
            "cutout": how.cutout,
        }

    def loaders(self, seed: int, device: Device) -> tuple[DeviceLoader, DeviceLoader]:
        """The batches for training and for testing, made on a device.

        Args:
            seed: Of the order of the training images and of how they are varied.
            device: Holds all images while the loaders exist.
        """
        mean, std = standardization(self.train[0])
        how = self.augmentation
        varied = ImageTransform(
            flip=how.flip, padding=how.shift, padding_mode=how.border, cutout=how.cutout, mean=mean, std=std
        )
        train = DeviceLoader(*self.train, per_process(self.batch_size), transform=varied, device=device, seed=seed)
        as_is = ImageTransform(mean=mean, std=std)
        batch = max(1, _EVAL_BATCH // dist.get_world_size())
        return train, DeviceLoader(*self.test, batch, transform=as_is, device=device, shuffle=False)


def check_samples(options: Mapping[str, Any]) -> None:
    """Refuse numbers of images, and shifts, that cannot be.

    Args:
        options: Values by name, with those of `Data` in `composer.recipes.digits`.

    Raises:
        ValueError: One cannot be, or two exclude each other.
    """
    least = {"train_samples": 1, "test_samples": 1, "validation_samples": 1, "batch_size": 1, "shift": 0}
    for name, value in least.items():
        check_at_least(name, options[name], value)
    if options["test_samples"] is not None and options["validation_samples"] is not None:
        raise ValueError("`test_samples` is of the test set, which `validation_samples` replaces: give one of them.")


def per_process(batch_size: int) -> int:
    """A process's part of a batch.

    Raises:
        ValueError: The processes cannot share it evenly.
    """
    processes = dist.get_world_size()
    if batch_size % processes:
        raise ValueError(f"`batch_size` must be a multiple of the number of processes, {processes}, got {batch_size}.")
    return batch_size // processes


def first(name: str, count: int | None, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The first images and their targets.

    Args:
        name: The option that says how many.
        count: How many. None: all.
        images: All of them.
        targets: Theirs.

    Raises:
        ValueError: There are fewer.
    """
    if count is not None and count > len(images):
        raise ValueError(f"`{name}` must be at most {len(images)}, the number of images there are, got {count}.")
    return images[:count], targets[:count]


def hold_out(count: int, images: Tensor, targets: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split a training set into images to train on and its last ones, to choose hyperparameters with.

    Args:
        count: How many to hold out.
        images: All of them.
        targets: Theirs.

    Returns:
        Images and targets to train on, and those held out.

    Raises:
        ValueError: None would be left to train on.
    """
    kept = len(images) - count
    if kept < 1:
        raise ValueError(
            f"`validation_samples` must be below {len(images)}, the number of images there are, got {count}."
        )
    return (images[:kept], targets[:kept]), (images[kept:], targets[kept:])


def standardization(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, exact: counted, because bytes have few values.

    Args:
        images: Shape (N, C, H, W), uint8.

    Returns:
        Both on the scale of bytes. A deviation is at least 1, so that images without contrast can be divided by it.
    """
    values = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.reshape(-1), minlength=256).double() / channel.numel()
        mean = share @ values
        means.append(float(mean))
        deviations.append(max(1.0, float((share @ (values - mean) ** 2).sqrt())))
    return means, deviations
