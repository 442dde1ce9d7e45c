"""A checkpoint that is saved by hand in the middle of a run has the weights of a scheduled one, such as averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer import Algorithm, Callback, State, Trainer
from composer.algorithms import EMA, LAWA, ScheduleFree
from composer.loggers import Logger
from composer.models import ComposerClassifier
from composer.testing import deep_compare

AT = 7


class Saves(Callback):
    """Saves by hand after a step, as a user's callback does."""

    trainer: Trainer
    path: str

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == AT:
            weights = {name: each.clone() for name, each in state.model.state_dict().items()}
            self.trainer.save_checkpoint(self.path)
            deep_compare(weights, dict(state.model.state_dict()))


def train(algorithm: Algorithm, path: Path | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = ComposerClassifier(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)), num_classes=3)
    callback = Saves()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=[(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(12)],
        max_duration="12ba",
        algorithms=[algorithm],
        callbacks=[] if path is None else [callback],
        progress_bar=False,
        device="cpu",
        **arguments,
    )
    if path is not None:
        callback.trainer, callback.path = trainer, str(path)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    "make",
    [
        lambda: EMA(half_life="3ba"),
        lambda: LAWA(interval="2ba", num_snapshots=2),
        lambda: ScheduleFree(lr=0.5),
    ],
    ids=["EMA", "LAWA", "ScheduleFree"],
)
def test_a_file_saved_by_hand_has_the_averages_and_training_goes_on_unchanged(make: Any, tmp_path: Path) -> None:
    plain = train(make())
    scheduled = train(make(), save_folder=str(tmp_path / "runs"), save_interval=f"{AT}ba", save_filename="ba{batch}.pt")
    by_hand = train(make(), tmp_path / "hand.pt")

    first, second = (
        torch.load(file, weights_only=False)["state"] for file in (tmp_path / f"runs/ba{AT}.pt", tmp_path / "hand.pt")
    )
    deep_compare(first["model"], second["model"])
    deep_compare(first["algorithms"], second["algorithms"])
    for trainer in (scheduled, by_hand):
        deep_compare(dict(plain.state.model.state_dict()), dict(trainer.state.model.state_dict()))


def test_after_training_the_averages_stay_in_the_model(tmp_path: Path) -> None:
    trainer = train(EMA(half_life="3ba"))
    weights = {name: each.clone() for name, each in trainer.state.model.state_dict().items()}

    trainer.save_checkpoint(str(tmp_path / "end.pt"))

    deep_compare(weights, dict(trainer.state.model.state_dict()))
    deep_compare(weights, dict(torch.load(tmp_path / "end.pt", weights_only=False)["state"]["model"]))
