"""Fixtures of the Trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from composer.testing import RandomClassificationDataset, SimpleModel, restore_signals
from composer.testing.servers import s3 as s3
from composer.testing.servers import s3_server as s3_server
from composer.testing.servers import stoppable_s3 as stoppable_s3
from composer.trainer import Trainer
from composer.utils.reproducibility import seed_context

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use
restore_signals()


class MakeTrainer:
    """Makes trainers over a small model with SGD, four batches of four samples, for two epochs."""

    def __init__(self) -> None:
        self.made: list[Trainer] = []

    def __call__(self, **kwargs: Any) -> Trainer:
        model = kwargs.pop("model", None)
        model = self.model() if model is None else model
        if "optimizers" not in kwargs:
            kwargs["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        defaults = {
            "model": model,
            "train_dataloader": self.loader(),
            "max_duration": "2ep",
            "progress_bar": False,
            "device": "cpu",
            "seed": 0,
        }
        trainer = Trainer(**{**defaults, **kwargs})
        self.made.append(trainer)
        return trainer

    @staticmethod
    def loader(size: int = 16, batch_size: int = 4, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(RandomClassificationDataset(size=size), batch_size=batch_size, **kwargs)

    @staticmethod
    def model() -> SimpleModel:
        def accuracy() -> dict[str, Any]:
            return {"Accuracy": MulticlassAccuracy(num_classes=2, average="micro", validate_args=False)}

        with seed_context(0):  # every model begins alike
            return SimpleModel(train_metrics=accuracy(), eval_metrics=accuracy())


@pytest.fixture
def make_trainer() -> Iterator[MakeTrainer]:
    """Makes trainers, and closes them at the end."""
    make = MakeTrainer()
    yield make
    for trainer in make.made:
        trainer.close()
