"""Reads the files of small image data sets, and says what is missing and how to get it."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from composer.utils import dist

__all__ = ["find", "inner_folder", "loaded", "missing", "read_cifar", "read_idx", "torchvision_command"]


T = TypeVar("T")


def missing(what: str, looked_for: Sequence[Path | str], command: str) -> FileNotFoundError:
    """The error for files that are not there.

    Args:
        what: The data set.
        looked_for: Where each thing was expected.
        command: A command of the shell that gets it.
    """
    places = ", ".join(repr(str(path)) for path in looked_for)
    return FileNotFoundError(f"{what} is not here: looked for {places}. To get it, run:\n  {command}")


def find(folder: Path, names: Sequence[str], what: str, command: str, *, compressed: bool = False) -> list[Path]:
    """The files of these names in a folder.

    Args:
        folder: Where to look.
        names: What to look for.
        what: The data set, for the message.
        command: What gets it, for the message.
        compressed: Whether `name.gz` will do.

    Raises:
        FileNotFoundError: One is not there.
    """
    found, absent = [], []
    for name in names:
        candidates = [folder / name, *([folder / f"{name}.gz"] if compressed else [])]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            absent.append(folder / name)
        else:
            found.append(path)
    if absent:
        raise missing(what, absent, command)
    return found


def torchvision_command(name: str, datadir: Path | str) -> str:
    """A command of the shell that gets a data set of torchvision.

    Args:
        name: The class in `torchvision.datasets`.
        datadir: The folder to give it.
    """
    return f'python -c "from torchvision.datasets import {name}; {name}({str(datadir)!r}, download=True)"'


def loaded(load: Callable[[], T], name: str, datadir: Path | str, download: bool) -> T:
    """What `load` returns, after torchvision has got the files if they are not there and it may.

    Args:
        load: Reads the files, or raises a FileNotFoundError.
        name: The class in `torchvision.datasets`.
        datadir: The folder to give it.
        download: Whether it may. All ranks must pass the same: the first one of each node downloads.
    """
    if not download:
        return load()
    with dist.run_local_rank_zero_first():
        try:
            return load()
        except FileNotFoundError:
            getattr(import_module("torchvision.datasets"), name)(str(datadir), download=True)
        return load()


def inner_folder(datadir: Path | str, layout: str) -> Path:
    """The folder `layout` in `datadir`, or `datadir` if it is that folder already."""
    root, parts = Path(datadir).expanduser(), Path(layout).parts
    return root if root.absolute().parts[-len(parts) :] == parts else root / layout


def read_idx(path: Path, num_dims: int) -> Tensor:
    """An array of bytes in the IDX format: the magic number, the sizes as big-endian words, the values.

    Args:
        path: The file; compressed if its name ends in `.gz`.
        num_dims: The dimensions it must have.

    Returns:
        A tensor of bytes.

    Raises:
        ValueError: The file holds something else.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"{str(path)!r} must be compressed by gzip, got something else: {error}.") from error
    begin = 4 * (num_dims + 1)
    header = np.frombuffer(content[: min(begin, len(content) // 4 * 4)], dtype=">u4")
    shape = tuple(int(size) for size in header[1:])
    if len(header) != num_dims + 1 or header[0] != 0x800 + num_dims or len(content) - begin != np.prod(shape):
        raise ValueError(f"{str(path)!r} must be an IDX file of bytes in {num_dims} dimensions, got something else.")
    return torch.tensor(np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(shape))


def read_cifar(paths: Sequence[Path], label_key: str) -> tuple[Tensor, Tensor]:
    """The images and labels of files of CIFAR's Python version.

    Args:
        paths: The files, in order.
        label_key: Where the labels are: "labels" of CIFAR-10, "fine_labels" or "coarse_labels" of CIFAR-100.

    Returns:
        Images of shape (N, 3, 32, 32), uint8, and labels of shape (N,), int64.

    Raises:
        ValueError: A file holds something else.
    """
    parts = [_read_cifar_file(path, label_key) for path in paths]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _read_cifar_file(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    with path.open("rb") as file:
        try:
            content = _ArrayUnpickler(file, encoding="latin1").load()
            images = torch.tensor(np.asarray(content["data"], dtype=np.uint8)).reshape(-1, 3, 32, 32)
            labels = torch.tensor(content[label_key], dtype=torch.int64)
        except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{str(path)!r} must be a file of CIFAR's Python version (a pickled dict with `data` and "
                f"`{label_key}`), got something else: {error}"
            ) from error
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{str(path)!r} must have a label for each image, got {len(labels)} for {len(images)}.")
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays and plain values only, so that no file can run code."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would import `{module}.{name}`")
