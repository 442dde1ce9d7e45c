from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from composer.core import Algorithm
from composer.recipes import Data, Network, Recipe, Runs, Training

_RANDOM = np.random.default_rng(0)
IDX_MAGIC = {1: 0x801, 3: 0x803}


@pytest.fixture
def tiny() -> Callable[..., Recipe]:
    """Makes recipes that train in a moment: 60 digits, 2 epochs of 3 batches, a network of 4 channels."""

    def make(name: str = "tiny", algorithms: tuple[Algorithm, ...] = (), epochs: int = 2) -> Recipe:
        data = Data(train_samples=60, test_samples=50, batch_size=20)
        return Recipe(name, algorithms, data, Network(width=4), Training(epochs=epochs))

    return make


@pytest.fixture(scope="session")
def quiet() -> Runs:
    return Runs(seeds=2, device="cpu", progress=False)


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([IDX_MAGIC[values.ndim], *values.shape], dtype=">u4")
    path.write_bytes(header.tobytes() + values.astype(np.uint8).tobytes())


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """A folder with 30 + 20 images in the layout of Fashion-MNIST."""
    for split, count in (("train", 30), ("t10k", 20)):
        raw = tmp_path / "FashionMNIST" / "raw"
        write_idx(raw / f"{split}-images-idx3-ubyte", _RANDOM.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{split}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder with 5 x 6 + 20 images in the layout of CIFAR-10."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, count in (*((f"data_batch_{i}", 6) for i in range(1, 6)), ("test_batch", 20)):
        batch = {
            "batch_label": name,
            "labels": [i % 10 for i in range(count)],
            "data": _RANDOM.integers(0, 256, (count, 3072)).astype(np.uint8),
            "filenames": [f"{i}.png" for i in range(count)],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path
