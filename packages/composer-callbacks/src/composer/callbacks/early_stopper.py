"""Stop training when a metric no longer improves."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from composer.callbacks._stopping import Comparison, comparison, metric_value, warn_of_unknown_label
from composer.core import Callback, State, Time, Timestamp, TimeUnit, ensure_time
from composer.loggers import Logger
from composer.utils import check_finite, plain_number


class EarlyStopper(Callback):
    """Stops training when a metric has not improved for longer than `patience`.

    A value is an improvement if `comp(value, best)` is true and it differs from the best value by more than
    `min_delta`. NaN is never an improvement, and any other value is an improvement on NaN.

    **Events** FIT_START (warns about an unknown label), EVAL_END for an evaluator, EPOCH_END for the training
    dataloader, and BATCH_END with a patience in batches.
    **Reads** the metric from `state.eval_metrics` or `state.train_metrics`. Its value is read from the device, so a
    patience in batches with the training dataloader synchronizes in every step.
    **Saves** the best value and its time.

    Args:
        monitor: The name of the metric.
        dataloader_label: The label of the evaluator, or of the training dataloader ("train").
        comp: `comp(value, best)` returns True if a value is better: a function of two scalar tensors, or 'greater'
            ('gt') or 'less' ('lt'). None: 'less' if the name of the metric contains "loss", "error" or "perplexity",
            otherwise 'greater'.
        min_delta: The smallest difference that counts, at least 0.
        patience: How long to continue without an improvement: a number of epochs, or a time in epochs or batches.

    Attributes:
        best: The best value so far, a tensor on the host; None before the first value.
        best_occurred: The time of the best value; None before the first value.
        patience: The patience as a `Time`.

    Raises:
        ValueError: An argument is out of range; at the events, if there is no such metric.

    Example:
        >>> EarlyStopper("CrossEntropyLoss", "eval", patience="3ep").patience
        Time(3, TimeUnit.EPOCH)

    Differs: a first value of NaN does not stay the best value.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: str | Comparison | None = None,
        min_delta: float = 0.0,
        patience: SupportsIndex | str | Time[Any] = 1,
    ) -> None:
        check_finite("Choose the direction with `comp`.", min_delta=min_delta, least=0)
        self.monitor, self.dataloader_label = monitor, dataloader_label
        self.comp = comparison(comp, monitor)
        self.min_delta = plain_number(min_delta)
        self.patience: Time[Any] = ensure_time(patience, TimeUnit.EPOCH, argument="patience")
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.patience.value < 0:
            raise ValueError(
                f"`patience` must be a time in epochs or batches, at least 0, got {patience!r}. Use '1ep' or '100ba'."
            )
        self.best: torch.Tensor | None = None
        self.best_occurred: Timestamp | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_occurred": None if self.best_occurred is None else self.best_occurred.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = None if state["best"] is None else torch.as_tensor(state["best"]).cpu()
        self.best_occurred = None
        if state["best_occurred"] is not None:
            self.best_occurred = Timestamp()
            self.best_occurred.load_state_dict(state["best_occurred"])

    def init(self, state: State, logger: Logger) -> None:
        self.best = self.best_occurred = None

    def fit_start(self, state: State, logger: Logger) -> None:
        warn_of_unknown_label(state, self.dataloader_label, "EarlyStopper")

    def eval_end(self, state: State, logger: Logger) -> None:
        self._check(state)

    epoch_end = eval_end

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.patience.unit is TimeUnit.BATCH:
            self._check(state)

    def _check(self, state: State) -> None:
        if state.dataloader_label != self.dataloader_label:
            return
        value = metric_value(state, self.dataloader_label, self.monitor)
        if self._improves(value):
            self.best, self.best_occurred = value.clone(), state.timestamp
        assert self.best_occurred is not None
        unit = self.patience.unit
        if state.timestamp.count(unit) - self.best_occurred.count(unit) > self.patience.value:
            state.stop_training()

    def _improves(self, value: torch.Tensor) -> bool:
        best = self.best
        if best is None or (best.isnan() and not value.isnan()):
            return True
        return bool(self.comp(value, best)) and abs(float(value) - float(best)) > self.min_delta
