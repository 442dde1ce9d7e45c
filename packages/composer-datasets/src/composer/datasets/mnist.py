"""MNIST and Fashion-MNIST: small grey images of handwritten digits and of clothes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer.core import DataSpec
from composer.datasets._device import AnyDevice
from composer.datasets._files import find, inner_folder, loaded, read_idx, torchvision_command
from composer.datasets._options import Options
from composer.datasets._vision import ImageKind, image_loader, synthetic_set

__all__ = [
    "build_fashion_mnist_dataloader",
    "build_mnist_dataloader",
    "build_synthetic_fashion_mnist_dataloader",
    "build_synthetic_mnist_dataloader",
    "load_fashion_mnist",
    "load_mnist",
]

# Mean and standard deviation of all training pixels.
_MNIST = ImageKind("MNIST", (33.3184,), (78.5675,), 2, False, 28, 10, 60_000, 10_000)
_FASHION = ImageKind("Fashion-MNIST", (72.9404,), (90.0212,), 2, True, 28, 10, 60_000, 10_000)


def load_mnist(datadir: str | Path, is_train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST as tensors.

    Args:
        datadir: The folder that torchvision was given; it holds `MNIST/raw`.
        is_train: Whether to take the 60,000 training images; otherwise the 10,000 test images.

    Returns:
        Images of shape (N, 1, 28, 28), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: They are not there; the message has the command that gets them.
        ValueError: A file is not what its name says.
    """
    return _load("MNIST", "MNIST", datadir, is_train)


def load_fashion_mnist(datadir: str | Path, is_train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Fashion-MNIST as tensors.

    Args:
        datadir: The folder that torchvision was given; it holds `FashionMNIST/raw`.
        is_train: Whether to take the 60,000 training images; otherwise the 10,000 test images.

    Returns:
        Images of shape (N, 1, 28, 28), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: They are not there; the message has the command that gets them.
        ValueError: A file is not what its name says.
    """
    return _load("Fashion-MNIST", "FashionMNIST", datadir, is_train)


def _load(title: str, name: str, datadir: str | Path, is_train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    part = "train" if is_train else "t10k"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    folder, command = inner_folder(datadir, f"{name}/raw"), torchvision_command(name, datadir)
    images_file, labels_file = find(folder, names, title, command, compressed=True)
    images, labels = read_idx(images_file, 3)[:, None], read_idx(labels_file, 1).long()
    if len(images) != len(labels):
        raise ValueError(
            f"{str(labels_file)!r} must have a label for each image of {str(images_file)!r}, got {len(labels)} for "
            f"{len(images)}."
        )
    return images, labels


def build_mnist_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    is_train: bool = True,
    download: bool = False,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    transform: Callable[..., Any] | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of MNIST. For training, images are shifted by up to 2 pixels, black coming in.

    Args:
        datadir: The folder that torchvision was given; it holds `MNIST/raw`.
        global_batch_size: Images per batch, of all ranks together.
        is_train: Whether to take the training images, augmented; otherwise the test images as they are.
        download: Whether to get the files first if they are not there, by torchvision.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the augmentation.
        device: Where to keep the whole set and make the batches ("gpu", "cpu", a `Device` or a torch device); see
            `DeviceLoader`. None: a `ResumableDataLoader`, on the host.
        transform: In place of the usual augmentation. On a device: an `ImageTransform`, which normalises as well; on
            the host: a function of Pillow images.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`; on the host only.

    Returns:
        Batches are pairs of normalised images of shape (N, 1, 28, 28), float32, and labels of shape (N,), int64.

    Raises:
        FileNotFoundError: The files are not there; the message has the command that gets them.
        TypeError: An argument of `dataloader_kwargs` is unknown, or there is a `device`.
        ValueError: `global_batch_size` is not a positive multiple of the number of ranks, or too large.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    images, labels = loaded(lambda: load_mnist(datadir, is_train), "MNIST", datadir, download)
    return image_loader(_MNIST, images, labels, transform, options)


def build_fashion_mnist_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    is_train: bool = True,
    download: bool = False,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    transform: Callable[..., Any] | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of Fashion-MNIST. For training, images are shifted by up to 2 pixels, black coming in, and mirrored.

    Args:
        datadir: The folder that torchvision was given; it holds `FashionMNIST/raw`.
        global_batch_size: Images per batch, of all ranks together.
        is_train: Whether to take the training images, augmented; otherwise the test images as they are.
        download: Whether to get the files first if they are not there, by torchvision.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the augmentation.
        device: Where to keep the whole set and make the batches ("gpu", "cpu", a `Device` or a torch device); see
            `DeviceLoader`. None: a `ResumableDataLoader`, on the host.
        transform: In place of the usual augmentation. On a device: an `ImageTransform`, which normalises as well; on
            the host: a function of Pillow images.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`; on the host only.

    Returns:
        Batches are pairs of normalised images of shape (N, 1, 28, 28), float32, and labels of shape (N,), int64.

    Raises:
        FileNotFoundError: The files are not there; the message has the command that gets them.
        TypeError: An argument of `dataloader_kwargs` is unknown, or there is a `device`.
        ValueError: `global_batch_size` is not a positive multiple of the number of ranks, or too large.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    images, labels = loaded(lambda: load_fashion_mnist(datadir, is_train), "FashionMNIST", datadir, download)
    return image_loader(_FASHION, images, labels, transform, options)


def build_synthetic_mnist_dataloader(
    global_batch_size: int,
    *,
    num_samples: int | None = None,
    is_train: bool = True,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    transform: Callable[..., Any] | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """`build_mnist_dataloader` without files: made-up images of MNIST's shape, which can be learned.

    Args:
        global_batch_size: Images per batch, of all ranks together.
        num_samples: How many there are. None: as many as in MNIST.
        is_train: Whether to augment, shuffle and drop the last batch; the test images are others than the training
            images, of the same classes.
        drop_last: As there.
        shuffle: As there.
        seed: As there; the images are the same with every seed.
        device: As there.
        transform: As there.
        **dataloader_kwargs: As there.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    return image_loader(_MNIST, *synthetic_set(_MNIST, num_samples, is_train), transform, options)


def build_synthetic_fashion_mnist_dataloader(
    global_batch_size: int,
    *,
    num_samples: int | None = None,
    is_train: bool = True,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    transform: Callable[..., Any] | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """`build_fashion_mnist_dataloader` without files: made-up images of Fashion-MNIST's shape, which can be learned.

    Args:
        global_batch_size: Images per batch, of all ranks together.
        num_samples: How many there are. None: as many as in Fashion-MNIST.
        is_train: Whether to augment, shuffle and drop the last batch; the test images are others than the training
            images, of the same classes.
        drop_last: As there.
        shuffle: As there.
        seed: As there; the images are the same with every seed.
        device: As there.
        transform: As there.
        **dataloader_kwargs: As there.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    return image_loader(_FASHION, *synthetic_set(_FASHION, num_samples, is_train), transform, options)
