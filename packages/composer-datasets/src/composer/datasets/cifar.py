"""CIFAR-10 and CIFAR-100: small coloured photographs of 10 and of 100 classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer.core import DataSpec
from composer.datasets._device import AnyDevice
from composer.datasets._files import find, inner_folder, loaded, read_cifar, torchvision_command
from composer.datasets._options import Options
from composer.datasets._vision import ImageKind, image_loader, synthetic_set

__all__ = [
    "build_cifar10_dataloader",
    "build_cifar100_dataloader",
    "build_synthetic_cifar10_dataloader",
    "build_synthetic_cifar100_dataloader",
    "load_cifar10",
    "load_cifar100",
]

# Mean and standard deviation of all training pixels, per channel.
_CIFAR10 = ImageKind("CIFAR-10", (125.307, 122.950, 113.865), (62.993, 62.089, 66.705), 4, True, 32, 10, 50_000, 10_000)
_CIFAR100 = ImageKind(
    "CIFAR-100", (129.304, 124.070, 112.434), (68.170, 65.392, 70.418), 4, True, 32, 100, 50_000, 10_000
)


def load_cifar10(datadir: str | Path, is_train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """CIFAR-10 as tensors.

    Args:
        datadir: The folder that torchvision was given; it holds `cifar-10-batches-py`.
        is_train: Whether to take the 50,000 training images; otherwise the 10,000 test images.

    Returns:
        Images of shape (N, 3, 32, 32), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: They are not there; the message has the command that gets them.
        ValueError: A file is not what its name says.
    """
    names = [f"data_batch_{i}" for i in range(1, 6)] if is_train else ["test_batch"]
    folder, command = inner_folder(datadir, "cifar-10-batches-py"), torchvision_command("CIFAR10", datadir)
    return read_cifar(find(folder, names, "CIFAR-10", command), "labels")


def load_cifar100(
    datadir: str | Path, is_train: bool = True, *, coarse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """CIFAR-100 as tensors.

    Args:
        datadir: The folder that torchvision was given; it holds `cifar-100-python`.
        is_train: Whether to take the 50,000 training images; otherwise the 10,000 test images.
        coarse: Whether the labels are of the 20 superclasses.

    Returns:
        Images of shape (N, 3, 32, 32), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: They are not there; the message has the command that gets them.
        ValueError: A file is not what its name says.
    """
    folder, command = inner_folder(datadir, "cifar-100-python"), torchvision_command("CIFAR100", datadir)
    paths = find(folder, ["train" if is_train else "test"], "CIFAR-100", command)
    return read_cifar(paths, "coarse_labels" if coarse else "fine_labels")


def build_cifar10_dataloader(
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
    """A loader of CIFAR-10. For training, images are shifted by up to 4 pixels, black coming in, and mirrored.

    Args:
        datadir: The folder that torchvision was given; it holds `cifar-10-batches-py`.
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
        Batches are pairs of normalised images of shape (N, 3, 32, 32), float32, and labels of shape (N,), int64.

    Raises:
        FileNotFoundError: The files are not there; the message has the command that gets them.
        TypeError: An argument of `dataloader_kwargs` is unknown, or there is a `device`.
        ValueError: `global_batch_size` is not a positive multiple of the number of ranks, or too large.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    images, labels = loaded(lambda: load_cifar10(datadir, is_train), "CIFAR10", datadir, download)
    return image_loader(_CIFAR10, images, labels, transform, options)


def build_cifar100_dataloader(
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
    """A loader of CIFAR-100. For training, images are shifted by up to 4 pixels, black coming in, and mirrored.

    Args:
        datadir: The folder that torchvision was given; it holds `cifar-100-python`.
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
        Batches are pairs of normalised images of shape (N, 3, 32, 32), float32, and labels of shape (N,), int64.

    Raises:
        FileNotFoundError: The files are not there; the message has the command that gets them.
        TypeError: An argument of `dataloader_kwargs` is unknown, or there is a `device`.
        ValueError: `global_batch_size` is not a positive multiple of the number of ranks, or too large.
    """
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    images, labels = loaded(lambda: load_cifar100(datadir, is_train), "CIFAR100", datadir, download)
    return image_loader(_CIFAR100, images, labels, transform, options)


def build_synthetic_cifar10_dataloader(
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
    """`build_cifar10_dataloader` without files: made-up images of CIFAR-10's shape, which can be learned.

    Args:
        global_batch_size: Images per batch, of all ranks together.
        num_samples: How many there are. None: as many as in CIFAR-10.
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
    return image_loader(_CIFAR10, *synthetic_set(_CIFAR10, num_samples, is_train), transform, options)


def build_synthetic_cifar100_dataloader(
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
    """`build_cifar100_dataloader` without files: made-up images of CIFAR-100's shape, which can be learned.

    Args:
        global_batch_size: Images per batch, of all ranks together.
        num_samples: How many there are. None: as many as in CIFAR-100.
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
    return image_loader(_CIFAR100, *synthetic_set(_CIFAR100, num_samples, is_train), transform, options)
