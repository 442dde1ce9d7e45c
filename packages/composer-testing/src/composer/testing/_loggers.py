"""A run for testing loggers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from composer.core import Engine, State
from composer.loggers import DeferredValue, Logger, LoggerDestination


class LoggedRun:
    """A training loop that logs the same metrics as the Trainer, with known values.

    For batch n, counted from 1, `time/batch` is n - 1, `loss` is n, and `accuracy` is n / 4. The accuracy is computed
    on demand and expires at the end of the batch.

    Args:
        *loggers: The logger destinations.
        name: The name of the run.
        duration: The `max_duration` of the run.
        device: The device of the losses and accuracies. On "cuda", waiting for it within a step raises an error.

    Attributes:
        state: The state, with five batches.
        logger: The logger of the destinations.
        engine: The engine, after INIT.

    Example:
        >>> class Printer(LoggerDestination):
        ...     accepts_deferred = True
        ...
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, {name: float(value) for name, value in metrics.items()})
        >>> run = LoggedRun(Printer())
        >>> run.fit(1)
        0 {'time/batch': 0.0}
        0 {'loss': 1.0, 'accuracy': 0.25}
        >>> run.evaluate(0.5)
        1 {'metrics/eval/accuracy': 0.5}
        >>> run.close()
    """

    def __init__(
        self, *loggers: LoggerDestination, name: str = "my-run", duration: str = "5ba", device: str = "cpu"
    ) -> None:
        self._device = device
        loader = [None] * 5
        self.state = State(model=torch.nn.Linear(1, 1), max_duration=duration, run_name=name, dataloader=loader)
        self.state.callbacks = list(loggers)
        self.logger = Logger(self.state, loggers)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self, batches: int = 5, *, end: bool = True) -> None:
        """Train.

        Args:
            batches: The number of batches.
            end: Run EPOCH_END and FIT_END afterwards.
        """
        self.engine.run_event("fit_start")
        for _ in range(batches):
            trained = self.state.timestamp.batch.value
            accuracy = DeferredValue(lambda number=trained + 1: self._value(number / 4))  # type: ignore[misc]
            with self._no_waiting():
                self.logger.log_metrics({"time/batch": trained})
                loss = DeferredValue.of_tensor(self._value(trained + 1))
                self.logger.log_metrics({"loss": loss, "accuracy": accuracy})
                self.state.timestamp = self.state.timestamp.to_next_batch(samples=2)
                self.engine.run_event("batch_end")
                accuracy.expire()
        if end:
            self.engine.run_event("epoch_end")
            self.engine.run_event("fit_end")

    def _value(self, value: float) -> torch.Tensor:
        return torch.full((), float(value), device=self._device)

    @contextmanager
    def _no_waiting(self) -> Iterator[None]:
        if torch.device(self._device).type != "cuda":
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def evaluate(self, result: float) -> None:
        """Evaluate with the label "eval".

        Args:
            result: The value to log as `metrics/eval/accuracy`.
        """
        loader, label = self.state.dataloader, self.state.dataloader_label
        self.state.set_dataloader([None], "eval")
        self.engine.run_event("eval_start")
        self.logger.log_metrics({"metrics/eval/accuracy": DeferredValue(lambda: torch.tensor(result))})
        self.engine.run_event("eval_end")
        self.state.set_dataloader(loader, label)

    def close(self) -> None:
        """Close the engine and the loggers."""
        self.engine.close()
