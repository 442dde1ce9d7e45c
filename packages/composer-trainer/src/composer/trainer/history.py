"""The losses and results of a run, which `Trainer.plot` draws if no logger stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer.loggers import DeferredValue

_MAX_LOSSES = 1024  # losses


class RunHistory:
    """The losses and results of a run, for `Trainer.plot`.

    A training step only appends to `recent`: losses stay on the device until they are drawn. Of a long run, only every
    second, fourth, eighth ... loss is stored, so that there are never more than 1024.

    Attributes:
        recent: The last losses, as the number of their batch, from 0, and the losses by name, without a graph. They
            must not be changed in place. Call `drop_recent` when there are many.
    """

    def __init__(self) -> None:
        self.recent: list[tuple[int, Mapping[str, torch.Tensor]]] = []
        self._num_stored = 0  # how many of the recent losses were considered for `_losses`
        self._losses: list[tuple[int, Mapping[str, torch.Tensor]]] = []
        self._every = 1  # store the losses of each batch whose number is a multiple of it
        self._metrics: dict[str, list[tuple[int, Any]]] = {}

    def drop_recent(self, keep: int) -> None:
        """Store the recent losses for drawing, and drop the first of them.

        Args:
            keep: The number of losses that stay in `recent`.
        """
        self._store_recent()
        del self.recent[: max(len(self.recent) - keep, 0)]
        self._num_stored = len(self.recent)

    def _store_recent(self) -> None:
        for batch, losses in self.recent[self._num_stored :]:
            if batch % self._every:
                continue
            self._losses.append((batch, losses))
            if len(self._losses) > _MAX_LOSSES:
                self._every *= 2
                self._losses = [(at, each) for at, each in self._losses if at % self._every == 0]
        self._num_stored = len(self.recent)

    def add_metrics(self, batch: int, metrics: Mapping[str, Any]) -> None:
        """Add the results of an evaluation that are numbers.

        Args:
            batch: The number of batches trained.
            metrics: Values by name.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() == 1:  # a metric may change its tensor later
                    self._metrics.setdefault(name, []).append((batch, DeferredValue.of_tensor(value.detach().clone())))
            elif isinstance(value, (int, float)):
                self._metrics.setdefault(name, []).append((batch, value))

    def series(self) -> dict[str, list[tuple[int, Any]]]:
        """Return the values by name, each with its batch. Waits for the device."""
        self._store_recent()
        series: dict[str, list[tuple[int, Any]]] = {}
        for batch, losses in self._losses:
            for name, loss in losses.items():
                series.setdefault(name, []).append((batch, DeferredValue.of_tensor(loss)))
        series |= self._metrics
        values = [value for points in series.values() for _, value in points]
        DeferredValue.fetch(value for value in values if isinstance(value, DeferredValue))
        return series
