from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from composer.core import Algorithm
from composer.recipes import SGD, Recipe, Runs, digits
from composer.recipes._images import CLASSIFICATION
from composer.recipes.cli import main

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use

from recipe_runs import OPTIONS, POEM, QUIET, RANDOM, Commanded, write_idx, write_photos


@pytest.fixture
def tiny() -> Callable[..., Recipe]:
    """Makes recipes that train in a moment: 60 digits, 2 epochs of 3 batches, a network of 8 channels."""

    def make(name: str = "tiny", algorithms: tuple[Algorithm, ...] = (), epochs: float = 2) -> Recipe:
        data = digits.Data(train_samples=60, test_samples=50, batch_size=20)
        return Recipe(name, data, digits.Network(width=8), SGD(epochs=epochs), CLASSIFICATION, algorithms)

    return make


@pytest.fixture(scope="session")
def quiet() -> Runs:
    return Runs(seeds=2, device="cpu", threads=1, progress=False)


@pytest.fixture(scope="session")
def one() -> Runs:
    return Runs(device="cpu", threads=1, progress=False)


@pytest.fixture(autouse=True)
def without_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSER_DATA", raising=False)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 30 + 20 images of Fashion-MNIST, 5 x 6 + 20 of CIFAR-10, 12 + 4 photos, and 1,620 characters."""
    root = tmp_path_factory.mktemp("data")
    for split, count in (("train", 30), ("t10k", 20)):
        raw = root / "FashionMNIST" / "raw"
        write_idx(raw / f"{split}-images-idx3-ubyte", RANDOM.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{split}-labels-idx1-ubyte", np.arange(count) % 10)
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name, count in (*((f"data_batch_{i}", 6) for i in range(1, 6)), ("test_batch", 20)):
        pixels = RANDOM.integers(0, 256, (count, 3072)).astype(np.uint8)
        batch = {"batch_label": name, "labels": [i % 10 for i in range(count)], "data": pixels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    write_photos(root)
    (root / "tinyshakespeare.txt").write_text(20 * POEM, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def command(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Commanded]:
    """Runs `composer-train RECIPE` with `OPTIONS`, for each recipe once."""

    @cache
    def run(recipe: str) -> Commanded:
        folder = tmp_path_factory.mktemp(recipe)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as text:
            patch.setenv("COLUMNS", "200")
            patch.setenv("COMPOSER_DATA", str(data))
            main([recipe, *QUIET.split(), *OPTIONS[recipe].split(), "--out", str(folder)])
        return Commanded(text.getvalue(), folder, json.loads((folder / "results.json").read_text()))

    return run
