"""A run that is killed again and again by `test_survival.py`: a program. Everything in it draws random numbers."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from composer.core import Algorithm, Event, State
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.optim import CosineAnnealingScheduler
from composer.trainer import Trainer

BATCHES_PER_EPOCH, EPOCHS = 8, 3


class NoisyData(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise from the generators of Python, NumPy and torch."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 8, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(8)  # noqa: NPY002
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Classifier(ComposerModel):
    """Has dropout, whose mask depends on the generators, and batch norm, whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 2),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])  # type: ignore[no-any-return]

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {"Accuracy": MulticlassAccuracy(num_classes=2, validate_args=False)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Drift(Algorithm):
    """Perturbs the weights by an amount that it remembers."""

    events = frozenset({Event.BATCH_END})

    def __init__(self) -> None:
        self.amount = torch.zeros(())

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.amount = 0.9 * self.amount + 1e-3 * torch.rand(())
        with torch.no_grad():
            next(state.model.parameters()).add_(self.amount)

    def state_dict(self) -> dict[str, Any]:
        return {"repr": repr(self), "amount": self.amount}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amount = state["amount"]


class JsonLines(LoggerDestination):
    """Appends what is logged, one line per call, as a killed process leaves it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        values = {key: float(value) for key, value in metrics.items()}
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def train(folder: str) -> None:
    """Start the run, continue it, or find it complete; then write what it ended with."""
    torch.set_num_threads(1)
    place = Path(folder)
    torch.manual_seed(0)
    model = Classifier()
    data = NoisyData(BATCHES_PER_EPOCH * 6)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=6, shuffle=True),
        eval_dataloader=DataLoader(NoisyData(12), batch_size=6),
        eval_interval="5ba",
        max_duration=f"{EPOCHS}ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        schedulers=CosineAnnealingScheduler(),
        algorithms=[Drift()],
        loggers=[JsonLines(place / "log.jsonl")],
        device_train_microbatch_size=3,
        seed=7,
        run_name="survivor",
        save_folder=str(place / "checkpoints"),
        save_interval="1ba",
        save_num_checkpoints_to_keep=3,
        autoresume=True,
        progress_bar=False,
        device="cpu",
    )
    (place / f"started-{os.getpid()}").touch()
    trainer.fit()
    state = trainer.state
    ended = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizers[0].state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "batch": state.timestamp.batch.value,
        "train_metrics": {name: float(value) for name, value in state.train_metric_values.items()},
        "eval_metrics": {name: float(value) for name, value in state.eval_metric_values.items()},
        "drift": trainer.state.algorithms[0].state_dict(),
        "next": torch.rand(3),
    }
    torch.save(ended, place / "ended.pt")
    trainer.close()


if __name__ == "__main__":
    train(FOLDER)  # type: ignore[name-defined]  # noqa: F821 - given by who runs this file
