"""One progress bar: tqdm, fed with values that may still be on the device."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TextIO

import torch
import tqdm.std

from composer.loggers import DeferredValue, format_log_data_value
from composer.utils import is_notebook

if TYPE_CHECKING:
    from composer.core import Timestamp

__all__ = ["Bar", "bar_file"]

_LIVE_SECONDS = 0.1  # between two redraws on a terminal
_PLAIN_SECONDS = 30.0  # between two lines in a log file
_GRAPHIC = "|{bar}|"
_UNITS = {"batch": "ba", "sample": "sp", "token": "tok", "epoch": "ep", "iteration": "iter", "second": "sec"}


class Bar:
    """A bar that follows a counter of a `Timestamp` and shows some of the logged values.

    On a terminal or in a notebook it is redrawn in place ten times a second. Anywhere else, such as in a log file, it
    prints a plain line every 30 seconds and one when it is closed. Between redraws a step costs a look at the clock.
    Values are copied from the device in the background and shown when they have arrived.

    Args:
        total: Where the counter ends; None if that is not known.
        bar_format: The format of the line, for tqdm.
        timestamp_key: The counter: a property of `Timestamp`, or "second" for its whole seconds of training.
        keys_to_log: Metrics whose name contains one of these are shown.
        position: The line of the terminal, for tqdm.
        n: Where the counter is.
        metrics: Values to show until others are logged.
    """

    def __init__(
        self,
        total: int | None,
        bar_format: str,
        timestamp_key: str,
        keys_to_log: Iterable[str],
        *,
        position: int = 0,
        n: int = 0,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        self.total = total
        self.bar_format = bar_format
        self.timestamp_key = timestamp_key
        self._count: Callable[[Timestamp], int] = _seconds
        if timestamp_key != "second":
            self._count = attrgetter(f"_{timestamp_key}")  # as a plain int, which costs nothing
        self.keys_to_log = list(keys_to_log)
        self.position = position
        self.n = n
        self._values: dict[str, Any] = dict(metrics or {})
        self._wanted: dict[str, bool] = {}  # whether a name is shown; asked several times per step
        self._coming: dict[str, Any] | None = None  # on their way from the device
        self._bar: Any = None  # None until shown, and on ranks that show nothing
        self._shares_line = False  # with whatever else is written to its stream
        self._interval = _LIVE_SECONDS
        self._due = 0.0  # when to look at the values again

    def show(self, stream: TextIO) -> None:
        """Draw the bar for the first time.

        Args:
            stream: Where to draw it.
        """
        file = bar_file(stream)
        self._shares_line = file is stream
        live = isinstance(file, _Output) or stream.isatty()
        self._interval = _LIVE_SECONDS if live else _PLAIN_SECONDS
        lines = None if live else _Lines(stream)
        self._bar = _tqdm()(
            total=self.total,
            initial=self.n,
            position=self.position,
            bar_format=self.bar_format if live else self.bar_format.replace(_GRAPHIC, ""),
            unit=_UNITS[self.timestamp_key.removesuffix("_in_epoch")],
            file=file if lines is None else lines,
            dynamic_ncols=live and self._shares_line,
            mininterval=self._interval,
            miniters=1,  # tqdm must not guess how many steps fit between two redraws: steps are uneven
        )
        if lines is not None:
            lines.open = True  # only now: an empty bar is no news in a log file
        self._set_text(self._values)

    def log(self, metrics: dict[str, Any]) -> None:
        """Keep the values that the bar shows.

        Args:
            metrics: Values by name.
        """
        for key, value in metrics.items():
            wanted = self._wanted.get(key)
            if wanted is None:
                wanted = self._wanted[key] = any(part in key for part in self.keys_to_log)
            if wanted:
                self._values[key] = _kept(value)

    def advance(self, timestamp: Timestamp) -> None:
        """Move the bar; once per batch.

        Args:
            timestamp: Where the counter is now.
        """
        n = self._count(timestamp)
        bar = self._bar
        if bar is None:
            self.n = n
            return
        now = time.perf_counter()
        if now >= self._due:
            self._look(now)
        step, self.n = n - self.n, n
        if self.total is not None and n > self.total:  # the last batch may reach past the end
            self.total = bar.total = n
        bar.update(step)

    def resume(self, paused_seconds: float) -> None:
        """Draw on after a pause, which then counts neither as elapsed time nor into the rate.

        Args:
            paused_seconds: The length of the pause.
        """
        if self._bar is not None and not self._bar.disable:
            self._bar.start_t += paused_seconds
            self._bar.last_print_t += paused_seconds

    def clear(self) -> None:
        """Wipe the line, so that something else can be written there."""
        if self._bar is not None and self._shares_line:
            self._bar.clear()

    def close(self, *, read: bool = True) -> None:
        """Draw the bar for the last time, and leave it there.

        Args:
            read: Whether to wait for the last values. After an error the device may not answer any more.
        """
        if self._bar is None:
            return
        if read:
            DeferredValue.fetch(_deferred(self._values))
            self._set_text(self._values)
        self._bar.close()
        self._bar = None

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Bar:
        """The bar that `state_dict` describes, not shown yet."""
        names = ("total", "bar_format", "timestamp_key", "keys_to_log", "position", "n", "metrics")
        return cls(**{name: state[name] for name in names})

    def state_dict(self) -> dict[str, Any]:
        """What is needed to show the same bar again."""
        DeferredValue.fetch(_deferred(self._values))
        return {
            "total": self.total,
            "position": self.position,
            "bar_format": self.bar_format,
            "metrics": {k: v.plain if type(v) is DeferredValue else v for k, v in self._values.items()},
            "keys_to_log": list(self.keys_to_log),
            "n": self.n,
            "timestamp_key": self.timestamp_key,
        }

    def _look(self, now: float) -> None:
        """Start copying the values, or show them if they have arrived; until then look again at every step."""
        if self._coming is None:
            self._coming = dict(self._values)
            DeferredValue.fetch(_deferred(self._coming))
        if all(value.ready for value in _deferred(self._coming)):
            self._set_text(self._coming)
            self._coming = None
            self._due = now + self._interval
        else:
            self._due = 0.0

    def _set_text(self, values: dict[str, Any]) -> None:
        self._bar.set_postfix_str(", ".join(f"{k}={_short(v)}" for k, v in values.items()), refresh=False)


def bar_file(stream: TextIO) -> Any:
    """Return the file for a bar of tqdm that is to be shown on `stream`.

    It is the stream itself; but for the streams of a notebook, an output of the cell that runs.
    """
    return _Output() if is_notebook() and stream in (sys.stdout, sys.stderr) else stream


def _tqdm() -> Any:
    """Return the class of the bars. In a notebook `tqdm.auto` would look for widgets, and warn where there are none."""
    return tqdm.std.tqdm if is_notebook() else import_module("tqdm.auto").tqdm


class _Output:
    """A file for tqdm that shows the line as an output of the notebook's cell, and updates this output.

    The output is plain text: widgets need scripts that some front ends fetch from the network.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._id = secrets.token_hex(16)
        self._shown: str | None = None

    def write(self, text: str) -> int:
        line = text.strip("\r\n ")
        wiped = not line and "\r" in text and self._shown is not None
        if line or wiped:
            display = import_module("IPython.display").display
            display({"text/plain": line}, raw=True, display_id=self._id, update=self._shown is not None)
            self._shown = line
        return len(text)

    def flush(self) -> None:
        """Do nothing: an output is sent at once."""


class _Lines:
    """A file for tqdm that turns redrawing into lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None)  # tqdm asks
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


def _kept(value: Any) -> Any:
    """The value as of now, without reading it from the device."""
    if type(value) is DeferredValue:
        return value.hold()
    if isinstance(value, torch.Tensor):
        return DeferredValue(value.detach).hold()
    return value


def _deferred(values: dict[str, Any]) -> list[DeferredValue]:
    return [value for value in values.values() if type(value) is DeferredValue]


def _short(value: Any) -> str:
    if isinstance(value, DeferredValue):
        value = value.plain
    return f"{value:.4g}" if isinstance(value, float) else format_log_data_value(value)
