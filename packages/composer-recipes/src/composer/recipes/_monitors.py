"""Callbacks of a run: training time, and calls of algorithms."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, ClassVar

import torch

from composer.core import Callback, Event, State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination


class StopAfter(Callback):
    """Callback that ends a run after `num_batches` batches."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value >= self._num_batches:
            state.stop_training()


class RunMemory(InMemoryLogger):
    """Keeps the logged values of a run; numbers are in its checkpoints, too."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, list[float]] = {}

    def series(self, key: str) -> list[float]:
        """Return the numbers that were logged under a name."""
        return [*self._loaded.get(key, []), *(float(value) for _, value in self.data.get(key, []))]

    def state_dict(self) -> dict[str, Any]:
        numbers = {key for key, values in self.data.items() if all(_is_number(value) for _, value in values)}
        return {"series": {key: self.series(key) for key in sorted({*self._loaded, *numbers})}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["series"]


class RunMonitor(LoggerDestination):
    """Measure the training time without evaluations, and count the calls of algorithms.

    It synchronizes with the device when it starts or stops the clock, so that the time covers all training work and
    nothing else. Its values are in the checkpoints of the run.

    Attributes:
        calls: Number of calls of each algorithm at each event: `calls[name][event]`.
        train_seconds: Wall-clock time of training.
        tested_at: `train_seconds` at each evaluation.
        seconds_before: Wall-clock time of the run in earlier processes, until its checkpoint.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self) -> None:
        self.calls: dict[str, Counter[Event]] = {}
        self.train_seconds = 0.0
        self.tested_at: list[float] = []
        self.seconds_before = 0.0
        self._began = time.perf_counter()
        self._started: float | None = None
        self._within_epoch = False

    def state_dict(self) -> dict[str, Any]:
        now = time.perf_counter()
        return {
            "calls": {name: {event.value: n for event, n in calls.items()} for name, calls in self.calls.items()},
            "train_seconds": self.train_seconds + (0.0 if self._started is None else now - self._started),
            "tested_at": list(self.tested_at),
            "seconds": self.seconds_before + now - self._began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = {name: Counter({Event(e): n for e, n in calls.items()}) for name, calls in state["calls"].items()}
        self.train_seconds, self.tested_at = state["train_seconds"], state["tested_at"]
        self.seconds_before = state["seconds"]

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch_in_epoch.value:  # a resumed run does not restart its epoch
            self._start(state)

    def log_traces(self, traces: dict[str, Any]) -> None:
        for key in traces:
            _, name, event = key.split("/")
            self.calls.setdefault(name, Counter())[Event(event.removeprefix("Event."))] += 1

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._start(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._stop(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._within_epoch = self._stop(state)
        self.tested_at.append(self.train_seconds)

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._within_epoch:
            self._start(state)

    def _start(self, state: State) -> None:
        _synchronize(state)
        self._started = time.perf_counter()

    def _stop(self, state: State) -> bool:
        """Stop the clock, and return True if it was running."""
        if self._started is None:
            return False
        _synchronize(state)
        self.train_seconds += time.perf_counter() - self._started
        self._started = None
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _synchronize(state: State) -> None:
    if state.device.name == "gpu":
        torch.cuda.synchronize()
    elif state.device.name == "mps":
        torch.mps.synchronize()
