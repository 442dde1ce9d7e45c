"""A logger that stores everything in memory."""

from __future__ import annotations

import copy
import datetime
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from composer.loggers import DeferredValue, LoggerDestination
from composer.loggers._text import table_json

if TYPE_CHECKING:
    from composer.core import State, Timestamp
    from composer.loggers import Logger

_IMMUTABLE = frozenset({float, int, str, bool, type(None)})
_MAX_PENDING = 8192  # calls of `log_metrics`; limits the device memory of unread values


class InMemoryLogger(LoggerDestination):
    """Logger that stores everything in memory, for notebooks and tests.

    A training step only appends to a list: values on the device are read when one of the attributes is read. Every
    value is a snapshot, so later changes to a logged object have no effect.

    Attributes:
        state: The state of the run; None before INIT.
        hyperparameters: Hyperparameters by name.
        tables: Tables by name, as JSON (pandas: `orient="split"`).

    Example:
        >>> from composer.core import State, Timestamp
        >>> from composer.loggers import Logger
        >>> state = State(model=torch.nn.Linear(1, 1), max_duration="1ep")
        >>> memory = InMemoryLogger()
        >>> logger = Logger(state, memory)
        >>> memory.init(state, logger)
        >>> logger.log_metrics({"loss": 0.5})
        >>> state.timestamp = state.timestamp.to_next_batch(samples=8)
        >>> logger.log_metrics({"loss": 0.25})
        >>> series = memory.get_timeseries("loss")
        >>> series["loss"].tolist(), series["sample"].tolist()
        ([0.5, 0.25], [0, 8])
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self) -> None:
        self.state: State | None = None
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self._pending: list[tuple[Timestamp, dict[str, Any]]] = []  # will be moved to `_data`
        self._data: dict[str, list[tuple[Timestamp, Any]]] = {}

    def init(self, state: State, logger: Logger) -> None:
        self.state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.tables[name] = table_json(columns, rows)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.state is None:
            raise RuntimeError(
                "`InMemoryLogger.log_metrics` must not be called before the run has begun, because a value is stored "
                "with the run's timestamp. Log from an event, or call `logger.init(state, ...)` first."
            )
        self._pending.append((self.state.timestamp, {key: _snapshot(value) for key, value in metrics.items()}))
        if len(self._pending) >= _MAX_PENDING:
            self._read_pending()

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, Any]]]:
        """Every logged value by name, as pairs of the timestamp and the value."""
        self._read_pending()
        return self._data

    @property
    def most_recent_values(self) -> dict[str, Any]:
        """The last value of each name, in a new dict."""
        return {name: series[-1][1] for name, series in self.data.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """The timestamp of the last value of each name, in a new dict."""
        return {name: series[-1][0] for name, series in self.data.items()}

    def get_timeseries(self, metric: str) -> dict[str, np.ndarray]:
        """Return all values of one metric as arrays, for plotting.

        Args:
            metric: A logged name.

        Returns:
            Arrays of one length: the values under `metric`, and for every field of `Timestamp.state_dict()` its values
            (wall-clock times in seconds). Values that do not form one array, such as curves of different lengths, are
            an array of objects.

        Raises:
            ValueError: Nothing was logged under that name.
        """
        data = self.data
        if metric not in data:
            known = ", ".join(sorted(data)) or "none"
            raise ValueError(f"`metric` must be a logged name, got {metric!r}. Logged names: {known}.")
        columns: dict[str, list[Any]] = {metric: []}
        for timestamp, value in data[metric]:
            columns[metric].append(value.tolist() if isinstance(value, torch.Tensor) else value)
            for field, time in timestamp.state_dict().items():
                seconds = time.total_seconds() if isinstance(time, datetime.timedelta) else time
                columns.setdefault(field, []).append(seconds)
        return {name: _array(column) for name, column in columns.items()}

    def _read_pending(self) -> None:
        """Read all pending values with one copy from the device, and store them."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        DeferredValue.fetch(
            value for _, metrics in pending for value in metrics.values() if type(value) is DeferredValue
        )
        for timestamp, metrics in pending:
            for key, value in metrics.items():
                if type(value) is DeferredValue:
                    value = value.value
                self._data.setdefault(key, []).append((timestamp, value))


def _array(column: list[Any]) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # numpy 1.24 warns of tensors of different lengths
            return np.array(column)
    except (FutureWarning, TypeError, ValueError):  # tensors on another device, or lists of different lengths
        objects = np.empty(len(column), dtype=object)
        objects[:] = column
        return objects


def _snapshot(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is DeferredValue:
        return value.hold()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)
