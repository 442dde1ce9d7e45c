"""CIFAR-10 and CIFAR-100: small color photographs of 10 and of 100 classes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer.datasets._small_images import SmallImageSet, not_found


def load_cifar10(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load CIFAR-10 as tensors.

    Args:
        datadir: The root folder passed to torchvision; it holds `cifar-10-batches-py`.
        is_train: True: the 50,000 training images. False: the 10,000 test images.

    Returns:
        Images of shape (N, 3, 32, 32), uint8, and labels of shape (N,), int64, in the original order.

    Raises:
        FileNotFoundError: A file does not exist; the message has the command that downloads it.
        pickle.UnpicklingError: A file holds something else.
    """
    names = [f"data_batch_{i}" for i in range(1, 6)] if is_train else ["test_batch"]
    return _load("CIFAR10", datadir, "cifar-10-batches-py", names, "labels")


def load_cifar100(datadir: str | Path, is_train: bool = True) -> tuple[Tensor, Tensor]:
    """Load CIFAR-100 as tensors; result and errors are those of `load_cifar10`.

    Args:
        datadir: The root folder passed to torchvision; it holds `cifar-100-python`.
        is_train: True: the 50,000 training images. False: the 10,000 test images.
    """
    return _load("CIFAR100", datadir, "cifar-100-python", ["train" if is_train else "test"], "fine_labels")


def _load(name: str, datadir: str | Path, layout: str, files: Sequence[str], key: str) -> tuple[Tensor, Tensor]:
    # Not by torchvision, which runs what a pickle says: it knows the checksums of the original files, and no others.
    paths = [Path(datadir).expanduser() / layout / file for file in files]
    absent = [path for path in paths if not path.is_file()]
    if absent:
        raise not_found(name, datadir, absent)
    contents = []
    for path in paths:
        with path.open("rb") as file:
            contents.append(_ArrayUnpickler(file, encoding="latin1").load())
    images = [torch.from_numpy(content["data"].reshape(-1, 3, 32, 32)) for content in contents]
    return torch.cat(images), torch.cat([torch.tensor(content[key]) for content in contents])


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of arrays and plain values only, so that a file cannot run code."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"A file of CIFAR must hold arrays, got one that would import `{module}.{name}`.")


_CIFAR10 = SmallImageSet(
    load_cifar10, "CIFAR10", (125.307, 122.950, 113.865), (62.993, 62.089, 66.705), padding=4, flip=True, size=32
)
_CIFAR100 = SmallImageSet(
    load_cifar100,
    "CIFAR100",
    (129.304, 124.070, 112.434),
    (68.170, 65.392, 70.418),
    padding=4,
    flip=True,
    size=32,
    num_classes=100,
)

build_cifar10_dataloader = _CIFAR10.build
"""Build a loader of CIFAR-10."""
build_cifar100_dataloader = _CIFAR100.build
"""Build a loader of CIFAR-100."""
build_synthetic_cifar10_dataloader = _CIFAR10.build_synthetic
"""Build a loader of synthetic images with the shape and classes of CIFAR-10."""
build_synthetic_cifar100_dataloader = _CIFAR100.build_synthetic
"""Build a loader of synthetic images with the shape and classes of CIFAR-100."""
