"""A logger that prints to the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex, TextIO

from composer.core import Time, TimeUnit
from composer.loggers import DeferredValue, LoggerDestination, format_log_data_value
from composer.loggers._text import config_block, table_json
from composer.loggers.spi import hold_metrics
from composer.utils import dist
from composer.utils.terminal import open_stream

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

NUM_EVAL_LOGGING_EVENTS = 11
"""The number of lines that an evaluation prints: one at its first batch and one at every tenth of it."""


class ConsoleLogger(LoggerDestination):
    """Logger that prints blocks of metrics to the terminal, on the first rank of each node.

    A training block holds the last value of everything logged since the previous block. It is printed at every multiple
    of `log_interval`, after the first batch (or epoch), and at the end of `fit`. Every evaluation prints its progress
    and then its results, whatever the interval. The hyperparameters are printed once, before anything else.

    Printing waits for the device, so use a long `log_interval` if training steps are fast. A metric that the Trainer
    computes on demand is not computed for batches that are not printed.

    Args:
        log_interval: A number of epochs, or a time string or `Time` in 'ep' or 'ba'.
        stream: A text stream, "stdout" or "stderr" (in a notebook, which shows standard error as an error, also
            stdout). A name is resolved when the logger is constructed.
        log_traces: Print which algorithms ran at which event.

    Attributes:
        logged_metrics: The values of the next block, by name.
        tables: The tables of the next block, by name, as JSON.
        hparams: The hyperparameters.

    Raises:
        ValueError: `log_interval` is in another unit or not positive, or `stream` is an unknown name.
        TypeError: `stream` is neither a string nor a stream.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        log_interval: SupportsIndex | str | Time[int] = "1ba",
        stream: TextIO | Literal["stdout", "stderr"] = "stderr",
        log_traces: bool = False,
    ) -> None:
        self.log_interval = Time.from_input(log_interval, TimeUnit.EPOCH)
        if self.log_interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.log_interval.value < 1:
            raise ValueError(
                f"`log_interval` must be a positive number of epochs or batches, got {log_interval!r}. "
                f"Use for example '1ep' or '100ba'."
            )
        self.stream = open_stream(stream)
        self.should_log_traces = log_traces
        self._reset()

    def _reset(self) -> None:
        self.hparams: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.tables: dict[str, str] = {}
        self._training_metrics: dict[str, Any] | None = None  # set aside during an evaluation
        self._config_printed = False
        self._printed_batch = 0
        self._eval_marks: frozenset[int] = frozenset()

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hparams.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged_metrics.update(metrics)
        if self._training_metrics is not None:  # what is logged during an evaluation is always printed
            hold_metrics(metrics)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.tables[name] = table_json(columns, rows)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self.should_log_traces:
            self._print("".join(f"[trace]: {key}:{format_log_data_value(run)}\n" for key, run in traces.items()))

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._reset()

    def fit_start(self, state: State, logger: Logger) -> None:
        self._print_config()

    predict_start = fit_start

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batches
        if self.log_interval.unit is TimeUnit.BATCH and (batch == 1 or batch % self.log_interval.value == 0):
            self._print_training(state)
        elif state.max_duration is not None and state.timestamp >= state.max_duration:
            hold_metrics(self.logged_metrics)  # the block at `fit_end` prints them
        else:  # values that cannot be read after their batch are not printed
            held = {k: v for k, v in self.logged_metrics.items() if type(v) is not DeferredValue or v.held}
            self.logged_metrics = held

    def epoch_end(self, state: State, logger: Logger) -> None:
        epoch = state.timestamp.epoch.value
        if self.log_interval.unit is TimeUnit.EPOCH and (epoch == 1 or epoch % self.log_interval.value == 0):
            self._print_training(state)
        else:
            hold_metrics(self.logged_metrics)  # the block at `fit_end` prints them

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value != self._printed_batch:
            self._print_training(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._print_config()
        if self._training_metrics is None:
            self._training_metrics, self.logged_metrics = self.logged_metrics, {}
        last = None if state.dataloader_len is None else state.dataloader_len.value
        self._eval_marks = frozenset(_marks(last)[:-1])  # the results are printed at the last one

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if state.eval_timestamp.batch.value in self._eval_marks:
            self._print(f"{_eval_progress(state)}\n")

    def eval_end(self, state: State, logger: Logger) -> None:
        self.log_to_console(self.logged_metrics, state, prefix="Eval ", is_train=False)
        self.tables = {}
        self.logged_metrics = self._training_metrics or {}
        self._training_metrics = None

    # ---- printing ----

    def log_to_console(self, data: dict[str, Any], state: State, prefix: str = "", is_train: bool = True) -> None:
        """Print one block: the progress, then a line for each value and each table.

        Args:
            data: Values by name.
            state: The state of the run.
            prefix: A prefix of each name.
            is_train: True if the block starts with the progress of the training; otherwise of the evaluation.
        """
        hold_metrics(data)  # every rank does this: computing a metric may be a collective
        if dist.get_local_rank() != 0:
            return
        DeferredValue.fetch(value for value in data.values() if type(value) is DeferredValue)
        lines = [f"{_training_progress(state) if is_train else _eval_progress(state)}:"]
        lines += [f"\t {prefix}{name}: {format_log_data_value(value)}" for name, value in data.items()]
        lines += [f"\t {prefix}{name}: {table}" for name, table in self.tables.items()]
        self._print("\n".join(lines) + "\n")

    def _print_training(self, state: State) -> None:
        self.log_to_console(self.logged_metrics, state, prefix="Train ")
        self.logged_metrics, self.tables = {}, {}
        self._printed_batch = state.timestamp.batch.value

    def _print_config(self) -> None:
        if self.hparams and not self._config_printed:
            self._config_printed = True
            self._print(config_block(self.hparams))

    def _print(self, text: str) -> None:
        if dist.get_local_rank() == 0:
            self.stream.write(text)
            self.stream.flush()


def _marks(last: int | None) -> list[int]:
    """Return the batches, counted from one, at which an evaluation of `last` batches prints a line."""
    if last is None or last < 1:
        return []
    if last < NUM_EVAL_LOGGING_EVENTS:
        return list(range(1, last + 1))
    steps = NUM_EVAL_LOGGING_EVENTS - 1
    return [1 + round(i * (last - 1) / steps) for i in range(steps + 1)]


def _training_progress(state: State) -> str:
    unit = None if state.max_duration is None else state.max_duration.unit
    if unit is None or unit is TimeUnit.EPOCH:
        now = state.timestamp
        epoch, batch = now.epoch.value + 1, now.batch_in_epoch.value
        if batch == 0 and state.previous_timestamp is not None:  # at the end of an epoch the counters have moved on
            epoch, batch = state.previous_timestamp.epoch.value + 1, state.previous_timestamp.batch_in_epoch.value
        return f"[epoch={epoch}][batch={_of(batch, state.dataloader_len)}]"
    return f"[{unit.name.lower()}={_of(state.timestamp.get(unit).value, state.max_duration)}]"


def _eval_progress(state: State) -> str:
    batch = _of(state.eval_timestamp.batch.value, state.dataloader_len)
    return f"[Eval batch={batch}] Eval on {state.dataloader_label} data"


def _of(count: int, total: Time[Any] | None) -> str:
    return str(count) if total is None else f"{count}/{total.value}"
