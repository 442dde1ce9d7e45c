"""A logger that shows progress bars."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

import numpy as np
import torch
import tqdm.std

from composer.core import TimeUnit
from composer.loggers import DeferredValue, LoggerDestination, format_log_data_value
from composer.loggers._bar_aware_streams import BarAwareStreams
from composer.loggers._text import config_block
from composer.utils import dist, is_notebook
from composer.utils.terminal import bar_file, open_stream

if TYPE_CHECKING:
    from composer.core import State, Timestamp
    from composer.loggers import Logger

_LIVE_SECONDS = 0.1  # between two redraws on a terminal
_PLAIN_SECONDS = 30.0  # between two lines in a log file
_GRAPHIC = "|{bar}|"
_UNITS = {"batch": "ba", "sample": "sp", "token": "tok", "epoch": "ep", "iteration": "iter", "second": "sec"}
_NAME = 24  # characters
_TRAIN_KEYS = ("loss/train",)
_STATS = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_STATS_OF_SECONDS = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # the rate is one per second
_STATS_WITHOUT_END = "{n_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class ProgressBarLogger(LoggerDestination):
    """Logger that shows a bar for the training and one for every evaluation, on the first rank of each node.

    The training has a bar for each epoch if `max_duration` is in epochs, else one for the whole run, in the unit of
    `max_duration`, such as seconds of training. It shows progress, time left, rate and the losses; an evaluation's bar
    shows its results. The rate of the training does not include the time of evaluations. The hyperparameters are
    printed once, before anything else.

    While there is a bar on a terminal, what a program prints, warns of or logs there gets lines of its own: the
    standard streams, and those of logging handlers, are replaced until the bar ends.

    On a terminal or in a notebook a bar is redrawn ten times a second; in a file it is a plain line every 30 seconds. A
    training step never waits for the device: the losses shown are copied in the background.

    Args:
        stream: A text stream, "stdout" or "stderr" (in a notebook, which shows standard error as an error, also
            stdout). A name is resolved when the logger is constructed.
        log_traces: Print which algorithms ran at which event.

    Attributes:
        hparams: The hyperparameters.

    Raises:
        ValueError: `stream` is an unknown name.
        TypeError: `stream` is neither a string nor a stream.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self, stream: TextIO | Literal["stdout", "stderr"] = "stderr", log_traces: bool = False) -> None:
        self.stream = open_stream(stream)
        self.should_log_traces = log_traces
        self.train_pbar: Bar | None = None
        self.eval_pbar: Bar | None = None
        self.hparams: dict[str, Any] = {}
        self._config_printed = False
        self._eval_started = 0.0
        self._in_fit = False
        self._streams = BarAwareStreams(self._clear)

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hparams.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        bar = self.eval_pbar or self.train_pbar
        if bar is not None:
            bar.log(metrics)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self.should_log_traces:
            self._print("".join(f"[trace]: {key}:{format_log_data_value(run)}\n" for key, run in traces.items()))

    # ---- the bar of the training ----

    def init(self, state: State, logger: Logger) -> None:
        self.hparams = {}
        self._config_printed = False

    def fit_start(self, state: State, logger: Logger) -> None:
        self._in_fit = True
        self._print_config()
        self.eval_pbar = None
        # Resumed in the middle of an epoch, there is no EPOCH_START.
        if not _by_epochs(state) or state.timestamp.batch_in_epoch.value > 0:
            self._open_train(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        if _by_epochs(state):
            self._open_train(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        bar = self.train_pbar
        if bar is not None:
            bar.advance(state.timestamp)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if _by_epochs(state):
            self._close_train()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._close_train()
        self._in_fit = False
        self._streams.stop()

    def _open_train(self, state: State) -> None:
        assert state.max_duration is not None  # the engine has checked
        label = state.dataloader_label or "train"
        if _by_epochs(state):
            key, n, total = "batch_in_epoch", state.timestamp.batch_in_epoch, state.dataloader_len
            title = f"{label:<5} epoch {state.timestamp.epoch.value + 1}"
        else:
            total = state.max_duration
            key, n = total.unit.name.lower(), state.timestamp.get(total.unit)
            title = label
        if self.train_pbar is not None:  # a failed `fit` left it
            self.train_pbar.close(read=False)
        self.train_pbar = _bar(title, None if total is None else total.value, key, _TRAIN_KEYS, n.value)
        self._show(self.train_pbar)

    def _close_train(self) -> None:
        if self.train_pbar is not None:
            self.train_pbar.close()
            self.train_pbar = None

    # ---- the bar of an evaluation ----

    def predict_start(self, state: State, logger: Logger) -> None:
        self._print_config()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._print_config()
        self._eval_started = time.perf_counter()
        if self.train_pbar is not None:
            self.train_pbar.clear()  # the evaluation's bar takes its line
        label = state.dataloader_label or "eval"
        total = None if state.dataloader_len is None else state.dataloader_len.value
        keys = ("eval", f"metrics/{label}/")
        self.eval_pbar = _bar(f"{label:<5} {_when(state)}", total, "batch", keys, 0)
        self._show(self.eval_pbar)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self.eval_pbar is not None:
            self.eval_pbar.advance(state.eval_timestamp)

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.eval_pbar is not None:
            self.eval_pbar.close()
            self.eval_pbar = None
        if self.train_pbar is not None:
            self.train_pbar.resume(time.perf_counter() - self._eval_started)
        elif not self._in_fit:
            self._streams.stop()

    # ---- the end ----

    def close(self, state: State, logger: Logger) -> None:
        for bar in (self.eval_pbar, self.train_pbar):
            if bar is not None:
                bar.close(read=False)
        self.eval_pbar = self.train_pbar = None
        self._streams.stop()

    # ---- printing ----

    def _show(self, bar: Bar) -> None:
        if dist.get_local_rank() == 0:
            bar.show(self.stream)
            if bar.shares_terminal:
                self._streams.start()

    def _print_config(self) -> None:
        if self.hparams and not self._config_printed:
            self._config_printed = True
            self._print(config_block(self.hparams))

    def _clear(self) -> None:
        for bar in (self.eval_pbar, self.train_pbar):
            if bar is not None:
                bar.clear()

    def _print(self, text: str) -> None:
        if dist.get_local_rank() == 0:
            self._clear()
            self.stream.write(text)
            self.stream.flush()


def _by_epochs(state: State) -> bool:
    return state.max_duration is not None and state.max_duration.unit is TimeUnit.EPOCH


def _bar(title: str, total: int | None, key: str, keys_to_log: tuple[str, ...], n: int) -> Bar:
    title = f"{title:<16}".replace("{", "{{").replace("}", "}}")
    stats = _STATS_WITHOUT_END
    if total is not None:
        stats = f"{{percentage:3.0f}}%|{{bar}}| {_STATS_OF_SECONDS if key == 'second' else _STATS}"
    return Bar(total, f"{title} {stats}", key, keys_to_log, n=n)


def _when(state: State) -> str:
    """Return the epoch or batch of an evaluation, for the title of its bar; empty outside of training."""
    now = state.timestamp
    if now.batch.value == 0:
        return ""
    if _by_epochs(state):
        return f"epoch {now.epoch.value + (now.batch_in_epoch.value > 0)}"
    return f"batch {now.batch.value}"


class Bar:
    """Progress bar of a counter of a `Timestamp`, with some of the logged values.

    On a terminal or in a notebook it is redrawn in place ten times a second. Anywhere else, such as in a log file, it
    prints a plain line every 30 seconds and one when it is closed. Between redraws a step only reads the clock. Values
    are copied from the device in the background and shown when they have arrived.

    Args:
        total: The final count; None if it is unknown.
        bar_format: The format of the line, for tqdm.
        timestamp_key: The counter: a property of `Timestamp`, or "second" for its whole seconds of training.
        keys_to_log: Metrics whose name contains one of these are shown.
        n: The current count.
    """

    def __init__(
        self,
        total: int | None,
        bar_format: str,
        timestamp_key: str,
        keys_to_log: Iterable[str],
        *,
        n: int = 0,
    ) -> None:
        self.total = total
        self.bar_format = bar_format
        self.timestamp_key = timestamp_key
        self._count: Callable[[Timestamp], int] = _seconds
        if timestamp_key != "second":
            unit = timestamp_key.removesuffix("_in_epoch")
            plural = "batches" if unit == "batch" else f"{unit}s"
            self._count = attrgetter(timestamp_key.replace(unit, plural, 1))  # the plain int, which is fast to read
        self.keys_to_log = list(keys_to_log)
        self._drawn = n  # the count that tqdm has
        self._now: Timestamp | None = None  # the counter is read from it when the bar is redrawn
        self._values: dict[str, Any] = {}
        self._shown: dict[tuple[str, ...], list[str]] = {}  # the keys are names that are logged together at every step
        self._arriving: dict[str, Any] | None = None  # values that are being copied from the device
        self._bar: Any = None  # None until `show`, which only some ranks call
        self.shares_terminal = False  # other output appears there, too
        self._shares_line = False  # other output uses the same stream
        self._is_drawn = False
        self._interval = _LIVE_SECONDS
        self._due = 0.0  # when to check the values again

    def show(self, stream: TextIO) -> None:
        """Draw the bar for the first time.

        Args:
            stream: The stream to draw on.
        """
        file = bar_file(stream)
        self._shares_line = file is stream
        live = not self._shares_line or stream.isatty()
        self.shares_terminal = live and self._shares_line
        self._interval = _LIVE_SECONDS if live else _PLAIN_SECONDS
        lines = None if live else _Lines(stream)
        # In a notebook `tqdm.auto` would use widgets, and warn if there are none.
        tqdm_class = tqdm.std.tqdm if is_notebook() else import_module("tqdm.auto").tqdm
        self._bar = tqdm_class(
            total=self.total,
            initial=self.n,
            bar_format=self.bar_format if live else self.bar_format.replace(_GRAPHIC, ""),
            unit=_UNITS[self.timestamp_key.removesuffix("_in_epoch")],
            file=file if lines is None else lines,
            dynamic_ncols=live and self._shares_line,
            mininterval=0.9 * self._interval,  # `advance` asks when it is due, by a clock read a little earlier
            miniters=1,  # tqdm must not guess the number of steps between two redraws: their durations vary
        )
        if lines is not None:
            lines.open = True  # the empty bar, drawn above, is not worth a line in a log file
        self._set_text(self._values)
        self._is_drawn = True

    def log(self, metrics: dict[str, Any]) -> None:
        """Store the values that the bar shows.

        Args:
            metrics: Values by name.
        """
        keys = tuple(metrics)
        shown = self._shown.get(keys)
        if shown is None:
            shown = [key for key in keys if any(part in key for part in self.keys_to_log)]
            self._shown[keys] = shown
        for key in shown:
            self._values[key] = _hold(metrics[key])

    def advance(self, timestamp: Timestamp) -> None:
        """Move the bar. Called once per batch.

        Args:
            timestamp: The current time.
        """
        self._now = timestamp
        now = time.perf_counter()
        if now >= self._due and self._bar is not None:
            self._redraw(now)

    def resume(self, paused_seconds: float) -> None:
        """Exclude a pause from the elapsed time and the rate.

        Args:
            paused_seconds: The length of the pause.
        """
        if self._bar is not None and not self._bar.disable:
            self._bar.start_t += paused_seconds
            self._bar.last_print_t += paused_seconds

    def clear(self) -> None:
        """Erase the line, so that other text can be written there."""
        if self._bar is not None and self._shares_line and self._is_drawn:
            self._is_drawn = False
            self._bar.clear()

    def close(self, *, read: bool = True) -> None:
        """Draw the bar for the last time, and leave it on the screen.

        Args:
            read: Wait for the last values. After an error the device may not respond.
        """
        if self._bar is None:
            return
        if read:
            DeferredValue.fetch(_deferred(self._values))
            self._set_text(self._values)
        self._bar.n, self._bar.total = self.n, self._total_at(self.n)
        self._bar.close()
        self._bar = None

    @property
    def n(self) -> int:
        """The current count."""
        return self._drawn if self._now is None else self._count(self._now)

    def _redraw(self, now: float) -> None:
        """Move the bar; start to copy the values, or show them once they have arrived."""
        if self._arriving is None:
            self._arriving = dict(self._values)
            DeferredValue.fetch(_deferred(self._arriving))
        if all(value.ready for value in _deferred(self._arriving)):
            self._set_text(self._arriving)
            self._arriving = None
            self._due = now + self._interval
        else:
            self._due = 0.0
        n, bar = self.n, self._bar
        bar.total = self._total_at(n)
        step, self._drawn = n - self._drawn, n
        self._is_drawn = True
        bar.update(step)

    def _total_at(self, n: int) -> int | None:
        """Return the final count, which the last batch may pass."""
        if self.total is not None and n > self.total:
            self.total = n
        return self.total

    def _set_text(self, values: dict[str, Any]) -> None:
        values = {name: value for name, value in values.items() if not _is_array(value)}
        names = _short_names(values)
        text = ", ".join(f"{name}={_short(value)}" for name, value in zip(names, values.values(), strict=True))
        self._bar.set_postfix_str(text, refresh=False)


class _Lines:
    """A file for tqdm that writes each redraw as a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None)  # read by tqdm
        self.open = False

    def write(self, text: str) -> int:
        line = text.strip("\r\n ")
        if line and self.open:
            self._stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _seconds(timestamp: Timestamp) -> int:
    return int(timestamp.total_wct.total_seconds())


def _hold(value: Any) -> Any:
    """Return the value as it is now, without reading it from the device."""
    if type(value) is DeferredValue:
        return value.hold()
    if isinstance(value, torch.Tensor):
        return DeferredValue(value.detach).hold()
    return value


def _deferred(values: dict[str, Any]) -> list[DeferredValue]:
    return [value for value in values.values() if type(value) is DeferredValue]


def _short_names(keys: Iterable[str]) -> list[str]:
    """Return the last parts of keys, for a line that has little room; whole keys if two of these are the same.

    >>> _short_names(["loss/train/total", "metrics/train/MulticlassAccuracy"])
    ['loss', 'MulticlassAccuracy']
    """
    keys = list(keys)
    names = [key.split("/")[0 if key.endswith("/total") else -1] for key in keys]
    names = [name if names.count(name) == 1 else key for name, key in zip(names, keys, strict=True)]
    return [name if len(name) <= _NAME else f"{name[: _NAME // 2]}...{name[3 - _NAME // 2 :]}" for name in names]


def _is_array(value: Any) -> bool:
    """Return True for a value that has no place in a line: an array of several numbers, or a collection."""
    if isinstance(value, DeferredValue):
        value = value.plain
    if isinstance(value, np.ndarray | torch.Tensor):
        return math.prod(value.shape) != 1
    return isinstance(value, Mapping | list | tuple)


def _short(value: Any) -> str:
    if isinstance(value, DeferredValue):
        value = value.plain
    return f"{value:.4g}" if isinstance(value, float) else format_log_data_value(value)
