"""A training loop by hand: the events and log calls of the Trainer, in its order, without the Trainer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import tqdm.auto

from composer.core import Engine, State, Timestamp
from composer.loggers import DeferredValue, Logger, LoggerDestination


class Run:
    """Drives loggers through a run. The loss of batch n, counted from 1, is n; the accuracy is n / 100."""

    batch_size, batch_seconds = 2, 0.5

    def __init__(
        self,
        loggers: LoggerDestination | Sequence[LoggerDestination],
        max_duration: str = "1ep",
        batches: int | None = 5,
        eval_every: int = 0,
        eval_batches: int = 3,
        eval_label: str = "eval",
        run_name: str = "my-run",
        state: State | None = None,
    ) -> None:
        self.loggers = [loggers] if isinstance(loggers, LoggerDestination) else list(loggers)
        self.batches = batches
        self.eval_every = eval_every
        self.eval_batches = eval_batches
        self.eval_label = eval_label
        self.computed = 0  # how many training metrics were really computed
        loader: Any = [None] * batches if batches is not None else iter(())
        if state is None:
            state = State(
                model=torch.nn.Linear(1, 1),
                max_duration=max_duration,
                run_name=run_name,
                dataloader=loader,
                dataloader_label="train",
            )
        self.state = state
        self.state.callbacks = self.loggers
        self.logger = Logger(self.state, self.loggers)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the end, or stop as if by an exception after some more batches."""
        state, event = self.state, self.engine.run_event
        remaining = stop_after
        event("fit_start")
        while state.timestamp < state.max_duration:
            if state.timestamp.batch_in_epoch.value == 0:
                event("epoch_start")
                self.logger.log_metrics({"time/epoch": state.timestamp.epoch.value})
            while self.batches is None or state.timestamp.batch_in_epoch.value < self.batches:
                self.train_batch()
                if self.eval_every and state.timestamp.batch.value % self.eval_every == 0:
                    self.evaluate()
                event("batch_checkpoint")
                if remaining is not None:
                    remaining -= 1
                    if remaining == 0:
                        return
                if state.timestamp >= state.max_duration:
                    break
            if self.batches is None or state.timestamp.batch_in_epoch.value < self.batches:
                break
            self.logger.log_metrics({"metrics/train/accuracy": torch.tensor(state.timestamp.batch.value / 100)})
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_epoch()
            event("epoch_end")
        self.logger.log_metrics(self.time())
        event("fit_end")

    def train_batch(self) -> None:
        state, log, event = self.state, self.logger.log_metrics, self.engine.run_event
        for name in ("before_dataloader", "after_dataloader", "batch_start"):
            event(name)
        log(self.time())
        number = state.timestamp.batch.value + 1
        log({"trainer/device_train_microbatch_size": self.batch_size})
        log({"loss/train/total": DeferredValue.of_tensor(torch.tensor(float(number)))})
        metric = DeferredValue(self._compute(number / 100))
        log({"metrics/train/accuracy": metric})
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(
            samples=self.batch_size, duration=timedelta(seconds=self.batch_seconds)
        )
        event("batch_end")
        metric.expire()

    def evaluate(self) -> None:
        state, event = self.state, self.engine.run_event
        before = state.dataloader, state.dataloader_label, state.dataloader_len
        state.set_dataloader([None] * self.eval_batches, self.eval_label)
        event("eval_start")
        state.eval_timestamp = Timestamp()
        for _ in range(self.eval_batches):
            event("eval_batch_start")
            state.eval_timestamp = state.eval_timestamp.to_next_batch(samples=self.batch_size)
            event("eval_batch_end")
        self.logger.log_metrics({f"metrics/{self.eval_label}/accuracy": torch.tensor(0.75)})
        event("eval_end")
        loader, label, length = before
        if loader is None:
            state.set_dataloader()
        else:
            state.set_dataloader(loader, label, -1 if length is None else length)

    def time(self) -> dict[str, Any]:
        now = self.state.timestamp
        return {
            "time/batch": now.batch.value,
            "time/sample": now.sample.value,
            "time/batch_in_epoch": now.batch_in_epoch.value,
            "time/sample_in_epoch": now.sample_in_epoch.value,
        }

    def close(self) -> None:
        self.engine.close()

    def _compute(self, value: float) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            self.computed += 1
            return torch.tensor(value)

        return compute


@pytest.fixture
def start() -> Any:
    """Begins a run: `start(loggers, max_duration, batches, ...)`. It is closed at the end of the test."""
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


@pytest.fixture
def local_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process another one of its node."""

    def become(rank: int) -> None:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))

    return become


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> io.StringIO:
    return Terminal()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces tqdm by mocks, which are always due, and sorts the bars it made by their format."""
    made = SimpleNamespace(train=[], eval=[])

    def make(bar_format: str, *args: Any, **kwargs: Any) -> MagicMock:
        mock = MagicMock()
        mock.n = 0
        mock.arguments = kwargs
        if "train" in bar_format:
            made.train.append(mock)
        if "eval" in bar_format:
            made.eval.append(mock)
        return mock

    monkeypatch.setattr(tqdm.auto, "tqdm", make)
    for interval in ("_LIVE_SECONDS", "_PLAIN_SECONDS"):
        monkeypatch.setattr(f"composer.loggers.progress_bar_logger.{interval}", 0.0)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stops the clock of the bars, which then only goes on by hand: `clock.now += 1`."""
    clock = SimpleNamespace(now=1000.0)
    stopped = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("composer.loggers.progress_bar_logger.time", stopped)
    monkeypatch.setattr(tqdm.std, "time", lambda: clock.now)
    return clock
