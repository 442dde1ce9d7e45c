"""Training metrics that cost nothing until somebody reads them.

The metrics of a batch come from the outputs its loss was computed from. Nearly always nobody looks at them before the
next batch replaces them, so the outputs are kept instead, and the metrics are updated when they are read. They are
updated at once where that may not be the same: with several microbatches, or a model with an `eval_forward` of its own
that does not say that it can wait (`composer.models.base.of_outputs_alone`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from composer.core import State
from composer.loggers import DeferredValue
from composer.models import ComposerModel
from composer.models.base import is_of_outputs_alone
from composer.utils import model_eval_mode

__all__ = ["TrainMetrics"]


class TrainMetrics:
    """Collects the training metrics of the current batch.

    Args:
        state: The run's state; its `train_metrics` are filled.
        model: The user's model, unwrapped.
        defer: Whether metrics may be computed on reading. Not with several ranks, where computing communicates.
        measured: Called when the model has been asked.
    """

    def __init__(
        self, state: State, model: ComposerModel, defer: bool, measured: Callable[[], None] = lambda: None
    ) -> None:
        self._state, self._model, self._measured = state, model, measured
        self._may_defer = defer
        self.set_model(model)
        self._batch: tuple[Any, Any] | None = None
        self._values: dict[str, DeferredValue] = {}
        self._reset = False

    def set_model(self, model: ComposerModel) -> None:
        """Set the model that says how to measure; loading a checkpoint may have replaced it."""
        self._model = model
        self._plain_forward = type(model).eval_forward is ComposerModel.eval_forward
        self._defer = self._may_defer and (self._plain_forward or is_of_outputs_alone(type(model).eval_forward))

    @property
    def wanted(self) -> bool:
        """Whether the model has training metrics."""
        return bool(self._state._train_metrics)

    def begin(self) -> None:
        """Forget the previous batch."""
        for value in self._values.values():
            value.expire()
        self._values = {}
        self._batch, self._reset = None, True
        self._state._pending_metrics = self._flush

    def collect(self, batch: Any, outputs: Any, alone: bool) -> None:
        """Take the outputs of a microbatch.

        Args:
            batch: The microbatch as it was before any algorithm changed it, on the device.
            outputs: What the model returned.
            alone: Whether it is the batch's only microbatch.
        """
        if self._defer and alone:
            self._batch = (batch, outputs)
            return
        self._flush()
        self._update(batch, outputs)

    def values(self) -> dict[str, DeferredValue]:
        """The metrics of the batch by name, computed when read."""
        if not self._values:
            self._values = {name: DeferredValue(partial(self._value, name)) for name in self._state._train_metrics}
            if not self._defer:
                for value in self._values.values():
                    value.hold()
        return self._values

    def last_values(self) -> dict[str, Any]:
        """The metrics of the batch by name, on the host, to be saved."""
        if not self.wanted:
            return {}
        return {name: _on_host(value.value) for name, value in self.values().items()}

    def restore(self, values: dict[str, Any]) -> None:
        """Take what `last_values` returned as the metrics of the batch, until the next batch begins."""
        to_device = self._state.device.tensor_to_device
        for name in self._state._train_metrics.keys() & values.keys():
            saved = values[name]
            value = to_device(saved) if isinstance(saved, torch.Tensor) else saved
            self._values[name] = DeferredValue(partial(_identity, value)).hold()

    def finish(self) -> None:
        """Compute what is pending, so that the last batch's outputs can be freed."""
        if self.wanted:
            self._flush()

    def _value(self, name: str) -> Any:
        return self._state.train_metrics[name].compute()

    def _flush(self) -> None:
        """Bring the metrics up to date."""
        self._state._pending_metrics = None
        if self._reset:
            self._reset = False
            for metric in self._state._train_metrics.values():
                metric.reset()
        if self._batch is not None:
            batch, outputs = self._batch
            self._batch = None
            self._update(batch, outputs)
        self._state._pending_metrics = None

    @torch.no_grad()
    def _update(self, batch: Any, outputs: Any) -> None:
        if not self._plain_forward:
            with model_eval_mode(self._model):
                outputs = self._model.eval_forward(batch, outputs)
        for metric in self._state._train_metrics.values():
            self._state.metric_outputs = _mapping(self._model.update_metric(batch, outputs, metric))
        self._measured()


def _identity(value: Any) -> Any:
    return value


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(part) for key, part in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
