"""A small run with the Trainer, for all tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.testing import RandomClassificationDataset, SimpleModel


def loader(size: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(RandomClassificationDataset(size=size), batch_size=batch_size)


def model(**kwargs: Any) -> SimpleModel:
    accuracy = {"MulticlassAccuracy": MulticlassAccuracy(num_classes=2, average="micro")}
    return SimpleModel(train_metrics=accuracy, eval_metrics=dict(accuracy), **kwargs)


class Run:
    """A trainer of a small model and the memory of what it logged."""

    def __init__(self, callbacks: Callback | Sequence[Callback], **kwargs: Any) -> None:
        self.memory = InMemoryLogger()
        arguments: dict[str, Any] = {"train_dataloader": loader(), "max_duration": "2ep", "device": "cpu"} | kwargs
        arguments.setdefault("model", model())
        if arguments.get("optimizers") is None:
            arguments["optimizers"] = torch.optim.SGD(arguments["model"].parameters(), lr=0.1)
        self.trainer = Trainer(callbacks=callbacks, loggers=self.memory, progress_bar=False, **arguments)
        self.state = self.trainer.state

    def fit(self, **kwargs: Any) -> Run:
        self.trainer.fit(**kwargs)
        return self

    def values(self, key: str) -> list[Any]:
        """Return the values logged under a key, in order."""
        return [value for _, value in self.memory.data.get(key, [])]

    def keys(self, start: str) -> set[str]:
        return {key for key in self.memory.data if key.startswith(start)}


@pytest.fixture
def run() -> Any:
    """Create runs: `run(callbacks, max_duration=..., ...)`. They are closed at the end of the test."""
    runs: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield make
    for one in runs:
        one.trainer.close()


@pytest.fixture
def make_model() -> Callable[..., SimpleModel]:
    return model


@pytest.fixture
def make_loader() -> Callable[..., DataLoader[Any]]:
    return loader
