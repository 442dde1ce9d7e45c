"""Stop training when a metric passes a threshold."""

from __future__ import annotations

import torch

from composer.callbacks._stopping import Comparison, comparison, metric_value, warn_of_unknown_label
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import check_finite


class ThresholdStopper(Callback):
    """Stops training when a metric is better than a threshold.

    **Events** FIT_START (warns about an unknown label), EVAL_END for an evaluator, EPOCH_END for the training
    dataloader, and BATCH_END with `stop_on_batch`.
    **Reads** the metric from `state.eval_metrics` or `state.train_metrics`. Its value is read from the device, so
    `stop_on_batch` with the training dataloader synchronizes in every step.

    Args:
        monitor: The name of the metric.
        dataloader_label: The label of the evaluator, or of the training dataloader ("train").
        threshold: The value to pass.
        comp: Training stops if `comp(value, threshold)` is true: a function of two scalar tensors, or 'greater' ('gt')
            or 'less' ('lt'). None: 'less' if the name of the metric contains "loss", "error" or "perplexity", otherwise
            'greater'.
        stop_on_batch: Also check the metric after every batch.

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
        self._check(state)

    epoch_end = eval_end

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.stop_on_batch:
            self._check(state)

    def _check(self, state: State) -> None:
        if state.dataloader_label != self.dataloader_label:
            return
        value = metric_value(state, self.dataloader_label, self.monitor)
        # Compare in the dtype of the metric, so that a value can equal the threshold.
        dtype = value.dtype if value.is_floating_point() else torch.float64
        if bool(self.comp(value, torch.tensor(self.threshold, dtype=dtype))):
            state.stop_training()
