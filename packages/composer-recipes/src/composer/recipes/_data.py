"""The images of a recipe: read, cut to size, measured for normalisation, and put on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer.devices import Device
from composer.recipes._batches import EvalBatches, TrainBatches
from composer.recipes._files import Arrays, read_folder
from composer.recipes._hparams import Data
from composer.utils import dist

__all__ = ["ImageData", "load_images"]

_DIGITS_TRAIN, _DIGITS_TEST = 500, 797  # the first and the last images; hyperparameters were chosen on those between
_EVAL_BATCH = 512


@dataclass(frozen=True)
class ImageData:
    """Labelled images, ready for training.

    Attributes:
        name: The data set.
        train_images: Shape (N, C, H, W), uint8.
        train_labels: Shape (N,), int64.
        test_images: Shape (M, C, H, W), uint8.
        test_labels: Shape (M,), int64.
        num_classes: Number of classes.
        mean: Of the training images' channels, shape (C,).
        std: Of the training images' channels, shape (C,).
        batch_size: Images per training batch.
        shift: Pixels by which training images are shifted at most.
        flip: Whether training images are mirrored at random.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    mean: Tensor
    std: Tensor
    batch_size: int
    shift: int
    flip: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def loaders(self, seed: int, device: Device) -> tuple[TrainBatches, EvalBatches]:
        """The batches for training and for testing, made on a device; of several processes, each has its share.

        Args:
            seed: Of the order of the training images and of how they are moved.
            device: Holds all images while the loaders exist.
        """
        move = device.tensor_to_device
        shared: dict[str, Any] = {"mean": move(self.mean), "std": move(self.std)}
        shared |= {"rank": dist.get_global_rank(), "world_size": dist.get_world_size()}
        images, labels = move(self.train_images), move(self.train_labels)
        train = TrainBatches(
            images, labels, batch_size=self.batch_size, shift=self.shift, flip=self.flip, seed=seed, **shared
        )
        images, labels = move(self.test_images), move(self.test_labels)
        return train, EvalBatches(images, labels, batch_size=_EVAL_BATCH, **shared)


def load_images(data: Data) -> ImageData:
    """Read the images that `data` describes.

    Args:
        data: Where they are, and which to take.

    Raises:
        FileNotFoundError: They are not there.
        ValueError: There are fewer than asked for, or a file is not what its name says.
    """
    arrays = _read_digits() if data.data is None else read_folder(data.data)
    train = _first("train_samples", data.train_samples, arrays.train_images, arrays.train_labels)
    test = _first("test_samples", data.test_samples, arrays.test_images, arrays.test_labels)
    if data.batch_size > len(train[0]):
        raise ValueError(
            f"`batch_size` must not be above the number of training images, {len(train[0])}, got {data.batch_size}."
        )
    size = min(arrays.train_images.shape[2:])
    mean, std = _measure(train[0])
    train_images, train_labels, test_images, test_labels = (torch.tensor(array) for array in (*train, *test))
    return ImageData(
        arrays.name,
        train_images,
        train_labels,
        test_images,
        test_labels,
        num_classes=int(max(arrays.train_labels.max(), arrays.test_labels.max())) + 1,
        mean=mean,
        std=std,
        batch_size=data.batch_size,
        shift=data.shift if data.shift is not None else size // 8 if size > 16 else 1,
        flip=data.data is not None,
    )


def _read_digits() -> Arrays:
    """The handwritten digits, doubled in size. The images of a writer follow each other, so the ends do not mix."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)  # they count to 16
    doubled = torch.nn.functional.interpolate(pixels, scale_factor=2, mode="bilinear")
    whole, labels = doubled.round().to(torch.uint8).numpy(), labels.astype(np.int64)
    train, test = slice(_DIGITS_TRAIN), slice(-_DIGITS_TEST, None)
    return Arrays("digits", whole[train], labels[train], whole[test], labels[test])


def _first(name: str, count: int | None, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if count is not None and count > len(images):
        raise ValueError(f"`{name}` must be at most {len(images)}, the number of images there are, got {count}.")
    return images[:count], labels[:count]


def _measure(images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, exact: counted, because bytes have few values."""
    values = np.arange(256)
    counts = np.stack([np.bincount(images[:, c].reshape(-1), minlength=256) for c in range(images.shape[1])])
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32).clamp(min=1.0)
