"""The logger: hands what is logged to every destination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.loggers._deferred import DeferredValue
from composer.loggers._failures import call_logger
from composer.loggers.logger_destination import LoggerDestination
from composer.utils.iter_helpers import ensure_tuple
from composer.utils.retrying import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core.engine import Plan
    from composer.core.state import State

__all__ = ["Logger", "format_log_data_value"]

_TAKES_NONE = LoggerDestination.log_metrics


class Logger:
    """Hands what is logged to every destination, in order. Callbacks and algorithms are given one to log with.

    A destination that raises an exception does not end the run, unless its `on_error` is "raise": the first one becomes
    a warning, and the others get what is logged as ever.

    `step` is the number of trained batches everywhere; None means `state.timestamp.batch`.

    Args:
        state: The state of the run.
        destinations: One destination or several.
        delivery_timeout: How many seconds the end of the run waits in all for services that fail or hang.

    Attributes:
        destinations: A tuple; may be replaced.
        delivery_deadline: What callbacks that deliver to a service share; see `composer.utils.retrying`.

    Raises:
        ValueError: `delivery_timeout` is not positive.

    Example:
        >>> class Printer(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> from composer.core import State
        >>> logger = Logger(State(model=torch.nn.Linear(1, 1), max_duration="1ep"), Printer())
        >>> logger.log_metrics({"lr": 0.1})
        0 {'lr': 0.1}
    """

    def __init__(
        self,
        state: State,
        destinations: LoggerDestination | Sequence[LoggerDestination] | None = None,
        *,
        delivery_timeout: float = 60.0,
    ) -> None:
        self.destinations: tuple[LoggerDestination, ...] = ensure_tuple(destinations)
        self.delivery_deadline = DeliveryDeadline(delivery_timeout)
        self._state = state
        self._explain: Callable[[], Plan | None] | None = None  # set by the engine that logs here

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine, which a copy does not have."""
        return {**vars(self), "_explain": None}

    @property
    def plan(self) -> Plan | None:
        """What `Engine.explain` says now of the engine that logs here: who acts at which event; None without one."""
        return None if self._explain is None else self._explain()

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log which algorithms ran at which event.

        Args:
            traces: Values by name.
        """
        for destination in self.destinations:
            call_logger(destination, "log_traces", traces)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Log hyperparameters.

        Args:
            parameters: Values by name.
        """
        for destination in self.destinations:
            call_logger(destination, "log_hyperparameters", parameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: The names of the columns.
            rows: One list per row, as long as `columns`.
            name: The name of the table.
            step: The number of trained batches; None is the current one.
        """
        step = self._step(step)
        for destination in self.destinations:
            call_logger(destination, "log_table", columns, rows, name, step)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics.

        A value may be a `DeferredValue`, which has not been read from the device. Destinations with
        `accepts_deferred = True` get it as it is, all others get its plain value.

        Args:
            metrics: Values by name.
            step: The number of trained batches; None is the current one.
        """
        destinations = self.destinations
        if not destinations:
            return
        if step is None:
            step = self._state.timestamp._batch
        plain = None
        for destination in destinations:
            if destination.accepts_deferred is True:
                call_logger(destination, "log_metrics", metrics, step)
            elif getattr(destination.log_metrics, "__func__", None) is not _TAKES_NONE:  # read for those who look
                if plain is None:
                    plain = _read(metrics)
                call_logger(destination, "log_metrics", plain, step)

    def log_images(
        self,
        images: np.ndarray | torch.Tensor | Sequence[np.ndarray | torch.Tensor],
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log images.

        Args:
            images: One image (H, W) or (C, H, W), several (N, C, H, W), or a sequence of images.
            name: The name of the images.
            channels_last: Whether the channels come last instead.
            step: The number of trained batches; None is the current one.
            masks: Segmentation masks by name, like `images` but without channels.
            mask_class_labels: The name of each class in the masks.
            use_table: Whether to show the images as a table, where the destination can.
        """
        step = self._step(step)
        for destination in self.destinations:
            call_logger(
                destination, "log_images", images, name, channels_last, step, masks, mask_class_labels, use_table
            )

    def upload_file(self, remote_file_name: str, file_path: str | Path, *, overwrite: bool = False) -> None:
        """Hand a file to every destination that stores files.

        Args:
            remote_file_name: The name to store it under. May contain `{run_name}`, `{rank}`, `{local_rank}`,
                `{world_size}`, `{local_world_size}` and `{node_rank}`.
            file_path: The local file; the same variables are filled in.
            overwrite: Whether to replace what is stored under that name.
        """
        from composer.utils import format_name_with_dist

        run_name = self._state.run_name
        remote_file_name = format_name_with_dist(remote_file_name, run_name)
        path = Path(format_name_with_dist(str(file_path), run_name))
        for destination in self.destinations:
            call_logger(destination, "upload_file", self._state, remote_file_name, path, overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        """Whether any destination stores files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _step(self, step: int | None) -> int:
        return self._state.timestamp._batch if step is None else step


def format_log_data_value(data: Any) -> str:
    """A logged value as text.

    Args:
        data: None, a string, number, tensor, or mappings and iterables of them. Anything else is `str(data)`.

    Returns:
        Floats with four decimals, strings in double quotes, tensors of one element as that element and others by
        their shape.

    Example:
        >>> format_log_data_value({"lr": 0.1, "shape": [1, 2]})
        '{ "lr": 0.1000, "shape": [1, 2], }'
    """
    if isinstance(data, DeferredValue):
        data = data.plain
    if data is None:
        return "None"
    if isinstance(data, str):
        return f'"{data}"'
    if isinstance(data, int):
        return str(data)
    if isinstance(data, float):
        return f"{data:.4f}"
    if isinstance(data, torch.Tensor):
        if data.ndim == 0 or data.shape == (1,):
            return format_log_data_value(data.item())
        return f"Tensor of shape {data.shape}"
    if isinstance(data, np.generic) or (isinstance(data, np.ndarray) and data.ndim == 0):
        return format_log_data_value(data.item())
    if isinstance(data, Mapping):
        items = "".join(f'"{key}": {format_log_data_value(value)}, ' for key, value in data.items())
        return f"{{ {items}}}"
    if isinstance(data, Iterable):
        return f"[{', '.join(format_log_data_value(value) for value in data)}]"
    return str(data)


def _read(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics with every deferred value read from the device."""
    for value in metrics.values():
        if type(value) is DeferredValue:
            return {k: v.value if type(v) is DeferredValue else v for k, v in metrics.items()}
    return metrics
