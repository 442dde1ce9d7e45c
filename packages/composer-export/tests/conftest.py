"""Fixtures of the export tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.testing import RandomClassificationDataset, SimpleConvModel, SimpleModel
from composer.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `exporting`


@pytest.fixture
def make_trainer() -> Iterator[Any]:
    """Build Trainers of a small model with four batches of four samples, and close them at the end."""
    trainers: list[Trainer] = []

    def make(**kwargs: Any) -> Trainer:
        model = kwargs.pop("model", None) or SimpleModel()
        defaults = {
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "train_dataloader": torch.utils.data.DataLoader(RandomClassificationDataset(size=16), batch_size=4),
            "max_duration": "2ep",
            "progress_bar": False,
            "device": "cpu",
            "seed": 0,
        }
        trainers.append(Trainer(model=model, **{**defaults, **kwargs}))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def conv() -> SimpleConvModel:
    from exporting import trained_conv

    return trained_conv()
