"""MNIST and Fashion-MNIST: small gray images of handwritten digits and of clothes."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from composer.datasets._small_images import SmallImageSet, find_files


def load_mnist(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load MNIST as tensors.

    Args:
        datadir: The root folder passed to torchvision; it holds `MNIST/raw`.
        is_train: True: the 60,000 training images. False: the 10,000 test images.

    Returns:
        Images of shape (N, 1, 28, 28), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: A file does not exist; the message has the command that downloads it.
        ValueError: A file has unexpected contents.
    """
    return _load("MNIST", "MNIST", datadir, is_train)


def load_fashion_mnist(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load Fashion-MNIST as tensors; arguments, result and errors are those of `load_mnist`.

    Args:
        datadir: The root folder passed to torchvision; it holds `FashionMNIST/raw`.
        is_train: True: the 60,000 training images. False: the 10,000 test images.
    """
    return _load("Fashion-MNIST", "FashionMNIST", datadir, is_train)


def _load(name: str, torchvision_name: str, datadir: str | Path, is_train: bool) -> tuple[Tensor, Tensor]:
    part = "train" if is_train else "t10k"
    names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    images_file, labels_file = find_files(
        name, torchvision_name, datadir, f"{torchvision_name}/raw", names, gzipped=True
    )
    images, labels = _read_idx(images_file, 3)[:, None], _read_idx(labels_file, 1).long()
    if len(images) != len(labels):
        raise ValueError(
            f"{str(labels_file)!r} must have a label for each image of {str(images_file)!r}, got {len(labels)} for "
            f"{len(images)}."
        )
    return images, labels


def _read_idx(path: Path, num_dims: int) -> Tensor:
    """Read a uint8 array in the IDX format: a magic number, the sizes as big-endian 32-bit integers, the values."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(
                f"{str(path)!r} must be compressed by gzip, but cannot be decompressed: {error}."
            ) from error
    begin = 4 * (num_dims + 1)
    header = np.frombuffer(content[: min(begin, len(content) // 4 * 4)], dtype=">u4")
    shape = tuple(int(size) for size in header[1:])
    if len(header) != num_dims + 1 or header[0] != 0x800 + num_dims or len(content) - begin != np.prod(shape):
        raise ValueError(
            f"{str(path)!r} must be an IDX file of bytes in {num_dims} dimensions, got another format. "
            "Download it again."
        )
    return torch.tensor(np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(shape))


_MNIST = SmallImageSet(load_mnist, "MNIST", (33.3184,), (78.5675,), padding=2, flip=False, size=28, num_train=60_000)
_FASHION_MNIST = SmallImageSet(
    load_fashion_mnist, "FashionMNIST", (72.9404,), (90.0212,), padding=2, flip=True, size=28, num_train=60_000
)

build_mnist_dataloader = _MNIST.build
"""Build a loader of MNIST."""
build_fashion_mnist_dataloader = _FASHION_MNIST.build
"""Build a loader of Fashion-MNIST."""
build_synthetic_mnist_dataloader = _MNIST.build_synthetic
"""Build a loader of synthetic images with the shape and classes of MNIST."""
build_synthetic_fashion_mnist_dataloader = _FASHION_MNIST.build_synthetic
"""Build a loader of synthetic images with the shape and classes of Fashion-MNIST."""
