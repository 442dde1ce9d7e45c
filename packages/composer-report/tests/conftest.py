"""Recorded runs: by hand, and by the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import Engine, State
from composer.loggers import Logger, RunRecorder


class Recording:
    """A run by hand, recorded in a folder: nothing trains, anything may be logged."""

    def __init__(self, folder: Path, name: str = "by-hand", group: str | None = None, **options: Any) -> None:
        self.recorder = RunRecorder(folder, group=group)
        self.state = State(
            model=torch.nn.Linear(1, 1), max_duration="100ba", run_name=name, dataloader=[None] * 10, **options
        )
        self.state.callbacks = [self.recorder]
        self.logger = Logger(self.state, [self.recorder])
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self, losses: Sequence[float], name: str = "loss/train/total") -> Recording:
        self.engine.run_event("fit_start")
        for loss in losses:
            if self.state.timestamp.batch.value % 10 == 0:
                self.engine.run_event("epoch_start")
            self.logger.log_metrics({name: loss})
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=2)
            self.engine.run_event("batch_end")
            if self.state.timestamp.batch.value % 10 == 0:
                self.state.timestamp = self.state.timestamp.to_next_epoch()
        return self

    def end(self) -> Recording:
        self.engine.run_event("fit_end")
        return self

    def evaluate(self, result: float, label: str = "eval", name: str = "Accuracy") -> Recording:
        self.state.set_dataloader([None], label)
        self.engine.run_event("eval_start")
        self.logger.log_metrics({f"metrics/{label}/{name}": result})
        self.engine.run_event("eval_end")
        self.state.set_dataloader([None] * 10, "train")
        return self

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def record(tmp_path: Path) -> Any:
    """Begins a recording: `record("folder", ...)`. It is closed at the end of the test."""
    made: list[Recording] = []

    def begin(folder: str | Path = "run", **options: Any) -> Recording:
        made.append(Recording(tmp_path / folder, **options))
        return made[-1]

    yield begin
    for recording in made:
        recording.close()


Train = Callable[..., Path]


def train(folder: Path, max_duration: str = "3ep", seed: int = 1, group: str | None = None, **options: Any) -> Path:
    """A small run of the Trainer with algorithms, evaluations and checkpoints, recorded in a folder."""
    from torchmetrics.classification import MulticlassAccuracy

    from composer.algorithms.ema import EMA
    from composer.algorithms.label_smoothing import LabelSmoothing
    from composer.testing import RandomClassificationDataset, SimpleModel
    from composer.trainer import Trainer

    data = torch.utils.data.DataLoader(RandomClassificationDataset(size=32), batch_size=4)
    accuracy = {"MulticlassAccuracy": MulticlassAccuracy(num_classes=2, average="micro")}
    model = SimpleModel(eval_metrics=accuracy, seed=seed)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=data,
        max_duration=max_duration,
        algorithms=options.pop("algorithms", None) or [EMA(half_life="5ba"), LabelSmoothing()],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=[RunRecorder(folder, group=group)],
        run_name=options.pop("run_name", folder.name),
        auto_log_hparams=True,
        progress_bar=False,
        seed=seed,
        **{"device": "cpu", **options},
    )
    trainer.fit()
    trainer.close()
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four recorded runs: two seeds of each of two recipes."""
    root = tmp_path_factory.mktemp("runs")
    for recipe, duration in (("short", "2ep"), ("long", "3ep")):
        for seed in (1, 2):
            train(root / f"{recipe}-{seed}", duration, seed, recipe, save_folder=str(root / f"{recipe}-{seed}/ckpt"))
    return root


@pytest.fixture
def run_trainer() -> Train:
    return train


@pytest.fixture(scope="session")
def recording() -> type[Recording]:
    """The class, for tests that make their own folders."""
    return Recording
