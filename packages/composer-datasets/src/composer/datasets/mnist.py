"""MNIST and Fashion-MNIST: small gray images of handwritten digits and of clothes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from composer.datasets._small_images import SmallImageSet, not_found


def load_mnist(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load MNIST as tensors.

    Args:
        datadir: The root folder passed to torchvision; it holds `MNIST/raw`.
        is_train: True: the 60,000 training images. False: the 10,000 test images.

    Returns:
        Images of shape (N, 1, 28, 28), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: A file does not exist; the message has the command that downloads it.
    """
    return _load("MNIST", datadir, is_train)


def load_fashion_mnist(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load Fashion-MNIST as tensors; arguments, result and errors are those of `load_mnist`.

    Args:
        datadir: The root folder passed to torchvision; it holds `FashionMNIST/raw`.
        is_train: True: the 60,000 training images. False: the 10,000 test images.
    """
    return _load("FashionMNIST", datadir, is_train)


def _load(name: str, datadir: str | Path, is_train: bool) -> tuple[Tensor, Tensor]:
    from torchvision import datasets

    root = Path(datadir).expanduser()
    try:
        dataset = getattr(datasets, name)(str(root), train=is_train)
    except RuntimeError as error:
        raise not_found(name, datadir, [root / name / "raw"]) from error
    return dataset.data[:, None], dataset.targets


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
