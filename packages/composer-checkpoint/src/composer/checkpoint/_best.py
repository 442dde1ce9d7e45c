"""Which checkpoints are the best by a metric."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any, SupportsIndex

from composer.utils import plain_int

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["BestCheckpoints"]

log = logging.getLogger(__name__)


class BestCheckpoints:
    """Ranks checkpoints by a metric.

    Args:
        count: How many to keep; 0 is none.
        monitor: `"<evaluator>/<metric>"`, `"train/<metric>"` or `"loss/train/<loss>"`.
        mode: `"max"` if more is better, `"min"` if less is.

    Raises:
        ValueError: An argument cannot work, or one is missing.
    """

    def __init__(self, count: SupportsIndex, monitor: str | None, mode: str) -> None:
        number = plain_int(count)
        if number is None or number < 0:
            raise ValueError(f"`num_best_checkpoints_to_keep` must be a number of checkpoints, got {count!r}.")
        if mode not in ("max", "min"):
            raise ValueError(f"`monitor_mode` must be 'max' or 'min', got {mode!r}.")
        if (number > 0) != (monitor is not None):
            raise ValueError(
                "`num_best_checkpoints_to_keep` and `monitor` must be given together: how many to keep, and the metric "
                "that tells the best, for example `monitor='eval/MulticlassAccuracy'`."
            )
        if monitor is not None and "/" not in monitor:
            raise ValueError(
                f"`monitor` must name an evaluator and its metric, for example 'eval/{monitor}', got {monitor!r}."
            )
        self.count, self.monitor, self.mode = number, monitor, mode
        self.values: dict[str, float] = {}

    @property
    def evaluator(self) -> str | None:
        """The evaluator whose metric is monitored."""
        return None if self.monitor is None else self.monitor.partition("/")[0]

    @property
    def paths(self) -> list[str]:
        """The best checkpoints, the best first; of equals, the earlier is the better."""
        sign = -1 if self.mode == "max" else 1
        return sorted(self.values, key=lambda path: sign * self.values[path])[: self.count]

    @property
    def path(self) -> str | None:
        """The best checkpoint."""
        return next(iter(self.paths), None)

    def check(self, state: State) -> None:
        """Refuse a metric that the run does not have.

        Raises:
            ValueError: It has no such metric; the message lists those it has.
        """
        if self.monitor is None or self.monitor.startswith("loss/"):
            return
        known = [f"{label}/{name}" for label, metrics in state.eval_metrics.items() for name in metrics]
        known += [f"train/{name}" for name in state.train_metrics]
        if self.monitor not in known:
            raise ValueError(
                f"`monitor` must be a metric of this run, got {self.monitor!r}. It has: {', '.join(known) or 'none'}."
            )

    def consider(self, path: str, state: State) -> None:
        """Take a checkpoint that is about to be saved, with the metric's value now."""
        if self.monitor is None:
            return
        value = _value(self.monitor, state)
        if value is None or math.isnan(value):
            log.info("%s has no value yet, so %s is not ranked.", self.monitor, path)
            return
        self.values[path] = value
        self.values = {kept: self.values[kept] for kept in self.values if kept in self.paths}

    def state_dict(self) -> dict[str, Any]:
        """The values by path."""
        return {"monitor": self.monitor, "values": dict(self.values)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the values of the checkpoints that still exist, if they are of the same metric."""
        if saved.get("monitor") == self.monitor and self.monitor is not None:
            self.values = {path: value for path, value in saved["values"].items() if os.path.exists(path)}


def _value(monitor: str, state: State) -> float | None:
    if monitor.startswith("loss/"):
        value = state.total_loss_dict.get(monitor)
    else:
        label, _, name = monitor.partition("/")
        metrics = state.train_metrics if label == "train" else state.eval_metrics[label]
        metric = metrics[name]
        value = metric.compute() if metric.update_called else None
    return None if value is None else float(value)
