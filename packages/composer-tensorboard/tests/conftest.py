"""A training loop by hand, and what TensorBoard reads from the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composer.core import Engine, State
from composer.loggers import DeferredValue, Logger, LoggerDestination


class Run:
    """The loss of batch n, counted from 1, is n."""

    def __init__(self, *loggers: LoggerDestination, name: str = "my-run", duration: str = "5ba") -> None:
        loader = [None] * 5
        self.state = State(model=torch.nn.Linear(1, 1), max_duration=duration, run_name=name, dataloader=loader)
        self.state.callbacks = list(loggers)
        self.logger = Logger(self.state, loggers)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self, batches: int = 5, *, end: bool = True) -> None:
        self.engine.run_event("fit_start")
        for _ in range(batches):
            number = self.state.timestamp.batch.value + 1
            self.logger.log_metrics({"time/batch": number - 1})
            metric = DeferredValue(lambda number=number: torch.tensor(number / 100))
            self.logger.log_metrics({"loss": DeferredValue.of_tensor(torch.tensor(float(number))), "accuracy": metric})
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=2)
            self.engine.run_event("batch_end")
            metric.expire()
        if end:
            self.engine.run_event("epoch_end")
            self.engine.run_event("fit_end")

    def evaluate(self, result: float) -> None:
        loader, label = self.state.dataloader, self.state.dataloader_label
        self.state.set_dataloader([None], "eval")
        self.engine.run_event("eval_start")
        self.logger.log_metrics({"metrics/eval/accuracy": DeferredValue(lambda: torch.tensor(result))})
        self.engine.run_event("eval_end")
        self.state.set_dataloader(loader, label)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def start() -> Any:
    """Begins a run, which is closed at the end of the test."""
    runs: list[Run] = []

    def begin(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(folder: str | Path = "tensorboard_logs/my-run") -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture
def curve() -> Callable[..., list[tuple[int, float]]]:
    """The values of a scalar, with their steps."""

    def points(key: str, folder: str | Path = "tensorboard_logs/my-run") -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read(folder).Scalars(key)]

    return points


@pytest.fixture
def events() -> Callable[..., EventAccumulator]:
    return read
