"""Ends training when a metric passes a threshold."""

from __future__ import annotations

import torch

from composer.callbacks._stopping import Comparison, comparison, metric_value, warn_of_unknown_label
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import check_finite

__all__ = ["ThresholdStopper"]


class ThresholdStopper(Callback):
    """Ends training when a metric is better than a threshold.

    **Events** FIT_START, which warns if nothing is so labelled; EVAL_END, if that evaluator is watched; EPOCH_END, and
    with `stop_on_batch` BATCH_END, if the training loader is.
    **Reads** the metric from `state.eval_metrics` or `state.train_metrics`, at these events; its value is read from the
    device, so with `stop_on_batch` and the training loader every step waits for it.

    Args:
        monitor: The name of the metric.
        dataloader_label: The label of the evaluator, or of the training loader ("train").
        threshold: The value to pass.
        comp: Training ends if `comp(value, threshold)` holds: a function of two tensors without dimensions, or
            'greater' ('gt') or 'less' ('lt'). None: 'less' if the name of the metric contains "loss", "error" or
            "perplexity", else 'greater'.
        stop_on_batch: Whether to look after every batch.

    Raises:
        ValueError: `comp` is unknown; at the events, if there is no such metric.

    Example:
        >>> stopper = ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.9)
        >>> stopper.threshold, stopper.comp is torch.greater
        (0.9, True)
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | Comparison | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        self.monitor, self.dataloader_label = monitor, dataloader_label
        check_finite(threshold=threshold)
        self.threshold = float(threshold)
        self.comp = comparison(comp, monitor)
        self.stop_on_batch = stop_on_batch

    def fit_start(self, state: State, logger: Logger) -> None:
        warn_of_unknown_label(state, self.dataloader_label, "ThresholdStopper")

    def eval_end(self, state: State, logger: Logger) -> None:
        self._look(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._look(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.stop_on_batch:
            self._look(state)

    def _look(self, state: State) -> None:
        if state.dataloader_label != self.dataloader_label:
            return
        value = metric_value(state, self.dataloader_label, self.monitor)
        # In the dtype of the metric, in which it may be exactly the threshold.
        dtype = value.dtype if value.is_floating_point() else torch.float64
        if bool(self.comp(value, torch.tensor(self.threshold, dtype=dtype))):
            state.stop_training()
