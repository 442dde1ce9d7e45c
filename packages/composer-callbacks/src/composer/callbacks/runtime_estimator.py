"""Log an estimate of the remaining time of the run."""

from __future__ import annotations

import time
import warnings
from typing import Any, SupportsIndex

from composer.callbacks._units import seconds_in
from composer.core import Callback, State, Time, Timestamp, TimeUnit
from composer.loggers import Logger
from composer.utils import int_at_least


class _Scale:
    """The unit in which progress is measured. Epochs of known length are counted in batches."""

    def __init__(self, limit: Time[Any], length: int | None) -> None:
        self.limit, self.length = limit, length  # batches per epoch
        self.per_epoch = length if limit.unit is TimeUnit.EPOCH else None
        self.unit = limit.unit if self.per_epoch is None else TimeUnit.BATCH
        self.total: float = limit.value if self.per_epoch is None else limit.value * self.per_epoch

    def done(self, now: Timestamp) -> float:
        if self.per_epoch is not None:
            return now.epochs * self.per_epoch + now.batches_in_epoch
        return now.total_seconds if self.unit is TimeUnit.SECOND else now.count(self.unit)


class RuntimeEstimator(Callback):
    """Logs an estimate of the remaining time, including evaluations.

    The estimate assumes that training continues at the mean speed measured so far, and that each evaluator runs as
    often per batch as up to its last run, each time for its mean duration. Evaluators that have not run yet are not
    included.

    **Events** INIT, FIT_START, BATCH_START, BATCH_END, EVAL_START, EVAL_END; EVAL_STANDALONE_START and _END, between
    which nothing is measured.
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
        self._seconds = self._done = 0.0  # measured time and progress
        self._batches = 0
        self._start: tuple[float, float, int] | None = None  # clock, progress and batch of the last measurement
        self._latest: tuple[float, Timestamp] | None = None  # clock and time of the last batch, if not measured yet
        self._scale: _Scale | None = None
        self._first_batch: int | None = None
        self._evals: dict[str, tuple[int, float]] = {}  # number and seconds by label
        self._eval_start: float | None = None
        self._warned, self._is_training = False, True
        self.eval_frequency_per_label: dict[str, float] = {}

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._reset()
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def fit_start(self, state: State, logger: Logger) -> None:
        self._pause()
        self._is_training = True

    def batch_start(self, state: State, logger: Logger) -> None:
        if self._first_batch is None:
            self._first_batch = state.timestamp.batches
        if self._start is None and self._left_to_skip == 0:
            self._begin(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._left_to_skip > 0:
            self._left_to_skip -= 1
            return
        limit, scale = state.max_duration, self._scale
        if limit is None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "`RuntimeEstimator` cannot estimate the end of the run, because `max_duration` is not set. Set it.",
                    stacklevel=2,
                )
        elif self._start is None or scale is None or limit is not scale.limit or state._dataloader_len != scale.length:
            self._begin(state)
        else:
            self._latest = (time.perf_counter(), state.timestamp)
            if logger.destinations:
                self._measure()
                self._log(scale.total - self._start[1], logger)

    def _log(self, left: float, logger: Logger) -> None:
        if self._done <= 0:
            return
        left = max(0.0, left)
        seconds = self._seconds / self._done * left
        batches_left = self._batches / self._done * left
        for label, (count, spent) in self._evals.items():
            seconds += self.eval_frequency_per_label[label] * batches_left * spent / count
        logger.log_metrics({"time/remaining_estimate": seconds / self._divider})

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_start = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        start, label = self._eval_start, state.dataloader_label
        self._eval_start = None
        if start is None or label is None or self._first_batch is None or not self._is_training:
            return
        spent = time.perf_counter() - start
        self._measure()
        if self._start is not None:  # evaluation is not training time
            clock, done, batch = self._start
            self._start = (clock + spent, done, batch)
        count, seconds = self._evals.get(label, (0, 0.0))
        self._evals[label] = (count + 1, seconds + spent)
        batches = state.timestamp.batches - self._first_batch
        self.eval_frequency_per_label[label] = min(1.0, (count + 1) / batches) if batches > 0 else 0.0

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._pause()
        self._is_training = False

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._is_training = True

    # ---- measuring ----

    def _begin(self, state: State) -> None:
        self._measure()
        if state.max_duration is None:
            return
        limit, length = state.max_duration, state._dataloader_len
        scale = self._scale
        if scale is None or scale.limit is not limit or scale.length != length:  # progress has another unit now
            scale = self._scale = _Scale(limit, length)
            self._seconds, self._done, self._batches = 0.0, 0.0, 0
        self._start = (time.perf_counter(), scale.done(state.timestamp), state.timestamp.batches)

    def _pause(self) -> None:
        self._measure()
        self._start = None

    def _measure(self) -> None:
        """Add the progress since the last measurement to the totals."""
        if self._start is None or self._latest is None or self._scale is None:
            return
        (clock, done, batch), (now, timestamp) = self._start, self._latest
        self._start, self._latest = (now, self._scale.done(timestamp), timestamp.batches), None
        self._seconds += now - clock
        self._done += self._start[1] - done
        self._batches += timestamp.batches - batch
