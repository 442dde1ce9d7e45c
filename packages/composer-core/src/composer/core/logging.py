"""`Logger`, which passes logged values to each `LoggerDestination`, and the handling of destinations that fail."""

from __future__ import annotations

import logging
import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from composer.core.callback import Callback
from composer.core.deferred_value import DeferredValue
from composer.utils.delivery import DeliveryDeadline
from composer.utils.file_helpers import format_name_with_dist
from composer.utils.iter_helpers import ensure_tuple

if TYPE_CHECKING:
    from composer.core.engine import Plan
    from composer.core.state import State

log = logging.getLogger(__name__)

_NUM_FAILURES = "_composer_failures"  # an attribute of the destination


class LoggerDestination(Callback, ABC):
    """Base class of loggers: a file, the terminal, a tracking service. Override the methods it supports.

    It is also a callback: it can open at `init`, write at `batch_end` or `epoch_end`, and clean up in `close`. It runs
    on every rank. `log_metrics` must not communicate between ranks. A logger for a remote service can use
    `composer.loggers.spi`, which sends from a background thread.

    Attributes:
        accepts_deferred: True if `log_metrics` accepts values that are still on the device, as
            `composer.loggers.DeferredValue`. With False it receives plain values, and each call waits for the device.
        on_error: What to do when one of its methods raises an exception during a run. "warn": the first one becomes a
            warning with the logger, method and error, and its traceback is logged; later ones are counted, and the
            count is logged at the end; the run continues. "raise": the run ends. During `init`, only a lost connection
            or a timeout (`ConnectionError`, `TimeoutError`) is handled this way: anything else is a mistake to fix, and
            is raised.

    Example:
        >>> class Printer(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> Printer().log_metrics({"loss/train/total": 0.5}, step=3)
        3 {'loss/train/total': 0.5}
    """

    accepts_deferred: ClassVar[bool] = False
    on_error: str = "warn"

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log hyperparameters.

        Args:
            hyperparameters: Values by name.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: The names of the columns.
            rows: One list per row, as long as `columns`.
            name: The name of the table.
            step: The number of trained batches.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics. The dictionary is shared with the other destinations and must not be modified.

        Args:
            metrics: Values by name.
            step: The number of trained batches.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log which algorithms ran at which event.

        Args:
            traces: Values by name.
        """

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
            images: One image (H, W) or (C, H, W), several (N, C, H, W), or a sequence of images: floats in [0, 1],
                uint8 or bool.
            name: The name of the images.
            channels_last: True if the channels come last instead.
            step: The number of trained batches.
            masks: Segmentation masks by name: class indices as integers, shape (H, W) or (N, H, W), or a sequence of
                masks.
            mask_class_labels: The name of each class in the masks.
            use_table: Show the images as a table, where the destination can.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Store a file.

        Args:
            state: The state of the run.
            remote_file_name: The name to store it under.
            file_path: The local file. It may change or be deleted after the call returns.
            overwrite: Replace a file that is stored under that name.
        """

    def can_upload_files(self) -> bool:
        """Return True if `upload_file` stores files."""
        return False

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file that `upload_file` stored.

        Args:
            remote_file_name: The name it is stored under.
            destination: The path to write to.
            overwrite: Replace an existing file there.
            progress_bar: Show progress.

        Raises:
            NotImplementedError: This destination stores no files.
            FileNotFoundError: There is no such file.
            FileExistsError: `destination` exists and `overwrite` is False.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` does not store files, so it cannot download {remote_file_name!r}. Use a logger "
            f"whose `can_upload_files()` is True, or an object store."
        )


_BASE_LOG_METRICS = LoggerDestination.log_metrics


class Logger:
    """Logger of a run: passes logged values to every destination, in order. Callbacks and algorithms receive it.

    A destination that raises an exception does not end the run, unless its `on_error` is "raise": its first exception
    becomes a warning, and the other destinations are not affected.

    `step` is the number of trained batches everywhere; None means `state.timestamp.batch`.

    Args:
        state: The state of the run.
        destinations: One destination or several.
        delivery_timeout: How many seconds in total the end of the run waits for services that fail or hang.

    Attributes:
        destinations: A tuple; may be replaced.
        delivery_deadline: Shared by all callbacks that deliver to a service; see `composer.utils.delivery`.

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
        """Return the attributes without the engine, which a copy does not have."""
        return {**vars(self), "_explain": None}

    @property
    def plan(self) -> Plan | None:
        """The current `Engine.explain()` of the engine that logs here; None without an engine."""
        return None if self._explain is None else self._explain()

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log which algorithms ran at which event; see `LoggerDestination`."""
        for destination in self.destinations:
            call_logger(destination, "log_traces", traces)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Log hyperparameters, values by name."""
        for destination in self.destinations:
            call_logger(destination, "log_hyperparameters", parameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table; see `LoggerDestination`. A `step` of None is the current number of trained batches."""
        step = self._step(step)
        for destination in self.destinations:
            call_logger(destination, "log_table", columns, rows, name, step)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics.

        A value may be a `DeferredValue`, which has not been read from the device. Destinations with
        `accepts_deferred = True` get it as it is, all others get its plain value.

        Args:
            metrics: Values by name.
            step: The number of trained batches; None: the current number.
        """
        destinations = self.destinations
        if not destinations:
            return
        if step is None:
            step = self._state.timestamp.batches
        plain = None
        for destination in destinations:
            if destination.accepts_deferred is True:
                try:  # as in `call_logger`, at half its cost: called at every step
                    destination.log_metrics(metrics, step)
                except Exception as error:  # noqa: BLE001 - reported by `record_failure`
                    record_failure(destination, "log_metrics", error)
            elif getattr(destination.log_metrics, "__func__", None) is not _BASE_LOG_METRICS:
                if plain is None:  # values are read from the device only if a destination needs them
                    numbers = {key: value.value for key, value in metrics.items() if type(value) is DeferredValue}
                    plain = {**metrics, **numbers} if numbers else metrics
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
        """Log images; see `LoggerDestination`. A `step` of None is the current number of trained batches."""
        step = self._step(step)
        for destination in self.destinations:
            call_logger(
                destination, "log_images", images, name, channels_last, step, masks, mask_class_labels, use_table
            )

    def upload_file(self, remote_file_name: str, file_path: str | Path, *, overwrite: bool = False) -> None:
        """Pass a file to every destination that stores files.

        Args:
            remote_file_name: The name to store it under. May contain `{run_name}`, `{rank}`, `{local_rank}`,
                `{world_size}`, `{local_world_size}` and `{node_rank}`.
            file_path: The local file; the same variables are filled in.
            overwrite: Replace a file that is stored under that name.
        """
        run_name = self._state.run_name
        remote_file_name = format_name_with_dist(remote_file_name, run_name)
        path = Path(format_name_with_dist(str(file_path), run_name))
        for destination in self.destinations:
            call_logger(destination, "upload_file", self._state, remote_file_name, path, overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        """Return True if any destination stores files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _step(self, step: int | None) -> int:
        return self._state.timestamp.batches if step is None else step


def format_log_data_value(data: Any) -> str:
    """Format a logged value as text.

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


def call_logger(destination: LoggerDestination, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a destination; return None if it raised, after `record_failure`."""
    try:
        return getattr(destination, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - reported by `record_failure`
        record_failure(destination, method, error)
        return None


def record_failure(destination: LoggerDestination, method: str, error: Exception) -> None:
    """Warn of the first failure of a destination and count the later ones. Call it while `error` is handled.

    Raises:
        Exception: `error`, if the destination's `on_error` is "raise".
    """
    if destination.on_error == "raise":
        raise error
    count = vars(destination).get(_NUM_FAILURES, 0)
    vars(destination)[_NUM_FAILURES] = count + 1
    name = type(destination).__name__
    if count:
        log.debug("`%s.%s` failed again.", name, method, exc_info=error)
        return
    log.warning("`%s.%s` failed:", name, method, exc_info=error)
    warnings.warn(
        f"`{name}.{method}` failed: {type(error).__name__}: {error}. The run continues; later failures of this logger "
        f"are only counted. Set its `on_error` to 'raise' to stop the run instead.",
        stacklevel=4,
    )


def log_failure_count(destination: LoggerDestination) -> None:
    """Log how often a destination failed, if more than once: the first failure was reported by a warning."""
    count = vars(destination).pop(_NUM_FAILURES, 0)
    if count > 1:
        log.warning("`%s` failed %d times in this run; the first was reported.", type(destination).__name__, count)
