"""Reads Fashion-MNIST and CIFAR-10 from the files that torchvision stores, without torchvision."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Arrays", "read_folder"]

_FASHION = "FashionMNIST/raw"
_CIFAR = "cifar-10-batches-py"
_IDX_FILES = tuple(f"{split}-{what}-ubyte" for split in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
_CIFAR_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_DOWNLOAD = {
    _FASHION: "torchvision.datasets.FashionMNIST({root!r}, download=True)",
    _CIFAR: "torchvision.datasets.CIFAR10({root!r}, download=True)",
}


class Arrays(NamedTuple):
    """A data set as arrays.

    Attributes:
        name: What it is called.
        train_images: Shape (N, C, H, W), uint8.
        train_labels: Shape (N,), int64.
        test_images: Shape (M, C, H, W), uint8.
        test_labels: Shape (M,), int64.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_folder(root: Path) -> Arrays:
    """Read the data set that a folder holds.

    Args:
        root: The folder that torchvision was given, or the `FashionMNIST/raw` or `cifar-10-batches-py` in it. The files
            of Fashion-MNIST may be compressed, as `.gz`.

    Raises:
        FileNotFoundError: It holds neither, or not all files of one.
        ValueError: It holds both, or a file is not what its name says.
    """
    folders = {layout: _folder(root, layout) for layout in (_FASHION, _CIFAR)}
    found = [layout for layout, folder in folders.items() if folder.is_dir()]
    if len(found) == 2:
        raise ValueError(
            f"`data` must hold one data set, but {str(root)!r} holds both Fashion-MNIST and CIFAR-10. Name the folder "
            f"of one: {str(folders[_FASHION])!r} or {str(folders[_CIFAR])!r}."
        )
    if not found:
        fashion, cifar = (_DOWNLOAD[layout].format(root=str(root)) for layout in (_FASHION, _CIFAR))
        raise FileNotFoundError(
            f"`data` must be a folder with Fashion-MNIST or CIFAR-10, but there is neither {str(folders[_FASHION])!r} "
            f"nor {str(folders[_CIFAR])!r}. To get one, run `{fashion}` or `{cifar}`."
        )
    return (_read_fashion if found == [_FASHION] else _read_cifar)(folders[found[0]])


def _folder(root: Path, layout: str) -> Path:
    parts = Path(layout).parts
    return root if root.absolute().parts[-len(parts) :] == parts else root / layout


def _check_complete(folder: Path, layout: str, names: Sequence[str], *, compressed: bool) -> None:
    missing = [name for name in names if not _is_there(folder / name, compressed)]
    if missing:
        root = str(folder.parents[layout.count("/")])
        raise FileNotFoundError(
            f"{str(folder)!r} must hold {', '.join(names)}, but {', '.join(missing)} is missing. To get it, run "
            f"`{_DOWNLOAD[layout].format(root=root)}`."
        )


def _is_there(path: Path, compressed: bool) -> bool:
    return path.is_file() or (compressed and path.with_name(f"{path.name}.gz").is_file())


def _read_fashion(folder: Path) -> Arrays:
    _check_complete(folder, _FASHION, _IDX_FILES, compressed=True)
    train_images, train_labels, test_images, test_labels = (_read_idx(folder / name) for name in _IDX_FILES)
    labels = train_labels.astype(np.int64), test_labels.astype(np.int64)
    return Arrays("Fashion-MNIST", train_images[:, None], labels[0], test_images[:, None], labels[1])


def _read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the IDX format: the magic number, the sizes as big-endian words, the values."""
    content = path.read_bytes() if path.is_file() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    num_dims = 3 if "idx3" in path.name else 1
    begin = 4 * (num_dims + 1)
    header = np.frombuffer(content[:begin], dtype=">u4")
    shape = tuple(int(size) for size in header[1:])
    if len(header) != num_dims + 1 or header[0] != 0x800 + num_dims or len(content) - begin != np.prod(shape):
        raise ValueError(f"{str(path)!r} must be an IDX file of bytes in {num_dims} dimensions, got something else.")
    return np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(shape)


def _read_cifar(folder: Path) -> Arrays:
    _check_complete(folder, _CIFAR, _CIFAR_FILES, compressed=False)
    parts = [_read_cifar_batch(folder / name) for name in _CIFAR_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    return Arrays("CIFAR-10", images, labels, *parts[-1])


def _read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as file:
        try:
            batch = _ArrayUnpickler(file, encoding="latin1").load()
            images = np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
            return images, np.asarray(batch["labels"], dtype=np.int64)
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} must be a batch of CIFAR-10 for Python (a pickled dict with `data` and `labels`), got "
                f"something else: {error}"
            ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays and plain values only: unlike torchvision's reader, this one checks no checksum first."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would import `{module}.{name}`")
