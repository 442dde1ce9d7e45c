"""Training metrics, computed when they are read.

The metrics of a batch come from the outputs that its loss was computed from. They are rarely read before the next
batch replaces them, so only the outputs are kept, and the metrics are updated when they are read. They are updated
immediately where the result could differ: with several microbatches, or with a model whose `eval_forward` does not
declare `composer.models.base.of_outputs_alone`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from composer.core import State
from composer.devices import Device, DeviceCPU
from composer.loggers import DeferredValue
from composer.models import ComposerModel
from composer.models.base import is_of_outputs_alone
from composer.utils import model_eval_mode


class TrainMetrics:
    """Collects the training metrics of the current batch.

    Args:
        state: The run's state; its `train_metrics` are filled.
        model: The user's model, unwrapped.
        defer: Allow computing metrics when they are read. Not with several ranks, where computing communicates.
        on_update: Called after the metrics were updated.
    """

    def __init__(
        self, state: State, model: ComposerModel, defer: bool, on_update: Callable[[], None] = lambda: None
    ) -> None:
        self._state, self._on_update, self._may_defer = state, on_update, defer
        self.set_model(model)
        self._batch: tuple[Any, Any] | None = None
        self._values: dict[str, DeferredValue] = {}
        self._computes: dict[str, Callable[[], Any]] = {}
        self._reset = False
        self._flush_later = self._flush  # one object, because `begin` runs at every step

    def set_model(self, model: ComposerModel) -> None:
        """Use the metrics of this model; loading a checkpoint may have replaced it."""
        self._model = model
        move_metrics(self._state._train_metrics, self._state.device)
        self._plain_forward = type(model).eval_forward is ComposerModel.eval_forward
        self._defer = self._may_defer and (self._plain_forward or is_of_outputs_alone(type(model).eval_forward))

    @property
    def enabled(self) -> bool:
        """True if the model has training metrics."""
        return bool(self._state._train_metrics)

    def begin(self) -> None:
        """Drop the previous batch."""
        for value in self._values.values():
            value.expire()
        self._values = {}
        self._batch, self._reset = None, True
        self._state._pending_metrics = self._flush_later

    def collect(self, batch: Any, outputs: Any, alone: bool) -> None:
        """Add the outputs of a microbatch.

        Args:
            batch: The microbatch before any algorithm changed it, on the device.
            outputs: The outputs of the model.
            alone: The microbatch is the only one of its batch.
        """
        if self._defer and alone:
            self._batch = (batch, outputs)
            return
        self._flush()
        self._update(batch, outputs)

    def values(self) -> dict[str, DeferredValue]:
        """Return the metrics of the batch by name, computed when they are read."""
        if not self._values:
            if self._computes.keys() != self._state._train_metrics.keys():
                self._computes = {name: partial(self._value, name) for name in self._state._train_metrics}
            self._values = {name: DeferredValue(compute) for name, compute in self._computes.items()}
            if not self._defer:
                for value in self._values.values():
                    value.hold()
        return self._values

    def logged(self) -> dict[str, DeferredValue]:
        """Return the metrics of the batch under the names for loggers."""
        return {f"metrics/train/{name}": value for name, value in self.values().items()}

    def last_values(self) -> dict[str, Any]:
        """Return the metrics of the batch by name, on the host, for a checkpoint."""
        if not self.enabled:
            return {}
        return {name: DeviceCPU().batch_to_device(value.value) for name, value in self.values().items()}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore the values that `last_values` returned; they hold until the next batch begins."""
        for name in self._state._train_metrics.keys() & values.keys():
            self._values[name] = DeferredValue(partial(self._state.device.batch_to_device, values[name])).hold()

    def finish(self) -> None:
        """Compute pending metrics, so that the outputs of the last batch can be freed."""
        if self.enabled:
            self._flush()

    def _value(self, name: str) -> Any:
        return self._state.train_metrics[name].compute()

    def _flush(self) -> None:
        """Update the metrics."""
        self._state._pending_metrics = None
        if self._reset:
            self._reset = False
            for metric in self._state._train_metrics.values():
                metric.reset()
        if self._batch is not None:
            batch, outputs = self._batch
            self._batch = None
            self._update(batch, outputs)

    @torch.no_grad()
    def _update(self, batch: Any, outputs: Any) -> None:
        if not self._plain_forward:
            with model_eval_mode(self._model):
                outputs = self._model.eval_forward(batch, outputs)
        for metric in self._state._train_metrics.values():
            result: Any = self._model.update_metric(batch, outputs, metric)
            self._state.metric_outputs = dict(result) if isinstance(result, Mapping) else {}
        self._on_update()


def move_metrics(metrics: MutableMapping[str, Any], device: Device) -> None:
    """Move metrics to a device; their dtypes stay."""
    for name, metric in metrics.items():
        if not isinstance(metric, torch.nn.Module):
            continue
        # Metrics have a `dtype` since torchmetrics 1.3.
        parts: list[Any] = [part for part in metric.modules() if hasattr(part, "set_dtype") and hasattr(part, "dtype")]
        dtypes = [part.dtype for part in parts]
        metrics[name] = device.module_to_device(metric)
        for part, dtype in zip(parts, dtypes, strict=True):
            if part.dtype != dtype:  # torchmetrics forgets it in `to`
                part.set_dtype(dtype)
