"""Log an estimate of the remaining time of the run."""

from __future__ import annotations

import time
import warnings
from typing import Any, SupportsIndex

from composer.callbacks._units import seconds_in
from composer.core import Callback, State, Time, Timestamp
from composer.loggers import Logger
from composer.utils import int_at_least


class RuntimeEstimator(Callback):
    """Logs an estimate of the remaining time, including evaluations.

    The estimate assumes that training continues at the mean speed measured so far, and that each evaluator runs as
    often per batch as up to its last run, each time for its mean duration. Evaluators that have not run yet are not
    included.

    Training time is that of `state.timestamp`: a loop of your own must pass `duration` to `to_next_batch`.

    **Events** INIT, FIT_START, BATCH_START, BATCH_END, EVAL_START, EVAL_END; EVAL_STANDALONE_START and _END, between
    which evaluations do not count.
    **Cost** none on the device.

    Args:
        skip_batches: Number of batches of this process that are not measured at the start, because they include warmup.
        time_unit: "seconds", "minutes", "hours" or "days".

    Attributes:
        eval_frequency_per_label: Evaluations per batch until the last one, in [0, 1], by evaluator label.

    Raises:
        ValueError: `skip_batches` is negative or `time_unit` is unknown.

    Differs: pauses between two calls of `fit`, and evaluations outside of `fit`, do not count. A resumed run measures
        anew.
    """

    def __init__(self, skip_batches: SupportsIndex = 1, time_unit: str = "hours") -> None:
        self.skip_batches = int_at_least("skip_batches", skip_batches, 0, "batches", "Use 1.")
        self._divider, self.time_unit = seconds_in(time_unit), time_unit
        self._reset()

    def _reset(self) -> None:
        self._left_to_skip = self.skip_batches
        self._limit: Time[Any] | None = None  # the end of the run that the estimate is for
        self._start: tuple[Timestamp, float] | None = None  # where measuring begins: time, and fraction of the run
        self._first_batch: int | None = None
        self._evals: dict[str, tuple[int, float]] = {}  # number and seconds by label
        self._eval_start: float | None = None
        self._is_training = True
        self.eval_frequency_per_label: dict[str, float] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._reset()
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def batch_start(self, state: State, logger: Logger) -> None:
        if self._first_batch is None:
            self._first_batch = state.timestamp.batches
            if state.max_duration is None:
                warnings.warn(
                    "`RuntimeEstimator` cannot estimate the end of the run, because `max_duration` is not set. Set it.",
                    stacklevel=2,
                )
        if self._left_to_skip == 0 and state.max_duration is not self._limit:
            self._limit, fraction = state.max_duration, state.get_elapsed_duration()
            self._start = None if fraction is None else (state.timestamp, fraction.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._left_to_skip > 0:
            self._left_to_skip -= 1
            return
        fraction = state.get_elapsed_duration() if logger.destinations else None
        if self._start is None or fraction is None or state.max_duration is not self._limit:
            return
        start, before = self._start
        now, done = state.timestamp, fraction.value - before
        seconds = now.total_seconds - start.total_seconds
        if seconds <= 0 or done <= 0:  # the loop records no durations, or the length of its first epoch is not known
            return
        factor = max(0.0, 1 - fraction.value) / done  # what is left, as a multiple of what was measured
        estimate = seconds * factor
        for label, (count, spent) in self._evals.items():
            evaluations = self.eval_frequency_per_label[label] * (now.batches - start.batches) * factor
            estimate += evaluations * spent / count
        logger.log_metrics({"time/remaining_estimate": estimate / self._divider})

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_start = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        start, label = self._eval_start, state.dataloader_label
        self._eval_start = None
        if start is None or label is None or self._first_batch is None or not self._is_training:
            return
        count, seconds = self._evals.get(label, (0, 0.0))
        self._evals[label] = (count + 1, seconds + time.perf_counter() - start)
        batches = state.timestamp.batches - self._first_batch
        self.eval_frequency_per_label[label] = min(1.0, (count + 1) / batches) if batches > 0 else 0.0

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._is_training = False

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._is_training = True

    fit_start = eval_standalone_end  # a standalone evaluation that failed has no end
