"""What watches a run: the time that training takes, how often algorithms act, and one progress bar for all of it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, ClassVar

import torch

from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination, ProgressBarLogger

__all__ = ["RunBar", "StopAfter", "Watch"]


class StopAfter(Callback):
    """Ends a run early.

    Args:
        num_batches: After so many batches.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value >= self._num_batches:
            state.stop_training()


class Watch(LoggerDestination):
    """Measures the time spent in training, and counts what happens.

    The clock stands still in evaluations. The device is waited for whenever it starts or stops, so that the time holds
    all the work of training and nothing else.

    Attributes:
        acts: How often each algorithm acted at each event: `acts[name][event]`.
        passes: Forward and backward passes over a batch.
        train_seconds: Wall-clock time.
        tested_at: `train_seconds` at each evaluation.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self) -> None:
        self.acts: dict[str, Counter[Event]] = {}
        self.passes = 0
        self.train_seconds = 0.0
        self.tested_at: list[float] = []
        self._started: float | None = None
        self._within_epoch = False

    def log_traces(self, traces: dict[str, Any]) -> None:
        for key in traces:
            _, name, event = key.split("/")
            self.acts.setdefault(name, Counter())[Event(event.removeprefix("Event."))] += 1

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._start(state)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.passes += 1

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._stop(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._within_epoch = self._stop(state)
        self.tested_at.append(self.train_seconds)

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._within_epoch:
            self._start(state)

    def _start(self, state: State) -> None:
        _wait_for_device(state)
        self._started = time.perf_counter()

    def _stop(self, state: State) -> bool:
        """Stop the clock; returns whether it was going."""
        if self._started is None:
            return False
        _wait_for_device(state)
        self.train_seconds += time.perf_counter() - self._started
        self._started = None
        return True


class RunBar(LoggerDestination):
    """The Trainer's progress bar, one for the whole run: evaluations pause it, and what they gave is shown in it.

    Args:
        metric: What to show of it: the bar shows keys that end in it.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self, metric: str) -> None:
        self._bar = ProgressBarLogger("stderr")
        self._metric = metric
        self._paused = 0.0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._bar.log_metrics(metrics, step)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._bar.fit_start(state, logger)
        if self._bar.train_pbar is not None:
            self._bar.train_pbar.keys_to_log.append(self._metric)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._bar.batch_end(state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._paused = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._bar.train_pbar is not None:
            self._bar.train_pbar.resume(time.perf_counter() - self._paused)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._bar.fit_end(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._bar.close(state, logger)


def _wait_for_device(state: State) -> None:
    if state.device.name == "gpu":
        torch.cuda.synchronize()
    elif state.device.name == "mps":
        torch.mps.synchronize()
