"""A logger that writes a text file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO

import torch

from composer.loggers import DeferredValue, LoggerDestination, format_log_data_value
from composer.loggers._text import table_json
from composer.utils import check_finite, format_name_with_dist

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_WRITE_SECONDS = 1.0  # how far the file may lag behind, and the disk behind the file


class _Unread(NamedTuple):
    """A line that ends in a value which is still on the device."""

    start: str
    value: DeferredValue


class FileLogger(LoggerDestination):
    r"""Logger that writes all values, and the output of the process, to a text file on every rank.

    One line each, in the order of events::

        [hyperparameter]: seed: 3
        [metric][batch=1]: loss/train/total: 0.6931
        [trace]: algorithm_traces/MixUp/Event.BATCH_START:1
        [table]: Table: {"columns":["a"],"data":[[1]]}
        [stdout]: what the process printed
        [stderr]: and its warnings and errors

    Standard output and error are captured from construction to `close` and are still shown; of a progress bar, only its
    final line is written. Lines from before INIT, when the file is opened, are buffered until then.

    A training step does not wait for the device. Values are copied in the background and written about a second later.
    A flush waits for them, writes everything, calls `fsync` (at most once a second, and at `close`), and passes the
    file to the loggers that store files. A flush happens every `flush_interval` batches and epochs, at the start of an
    epoch or evaluation, at the end of `fit`, and at `close`. An uncaught exception is written to the disk immediately.

    Args:
        filename: The path of the file. May contain `{run_name}`, `{rank}`, `{local_rank}`, `{world_size}`,
            `{local_world_size}` and `{node_rank}`.
        remote_file_name: The name to store the file under, with the same variables; None is `filename`.
        capture_stdout: Capture standard output.
        capture_stderr: Capture standard error.
        buffer_size: Passed to `open` as `buffering`; 1 writes line by line.
        log_traces: Write which algorithms ran at which event.
        flush_interval: The number of batches, and of epochs, between two flushes.
        overwrite: Replace an existing file.
        append: Append to an existing file. A Trainer with `autoresume` turns it on, so that a relaunched
            run continues its log.

    Raises:
        ValueError: `buffer_size` is 0, `flush_interval` is not positive, or both `overwrite` and `append` are True.
        FileExistsError: At INIT, the file exists, and neither `overwrite` nor `append` is True.

    Differs: `overwrite=False` is honored; MosaicML's class replaces the file anyway.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        capture_stdout: bool = True,
        capture_stderr: bool = True,
        buffer_size: int = 1,
        log_traces: bool = True,
        flush_interval: int = 100,
        overwrite: bool = False,
        append: bool = False,
    ) -> None:
        if buffer_size == 0:
            raise ValueError("`buffer_size` must not be 0, which text files do not support. Use 1 for line by line.")
        check_finite(flush_interval=flush_interval, least=1)
        if overwrite and append:
            raise ValueError("`overwrite` and `append` exclude each other: replace an existing file, or append to it.")
        filename = os.path.expanduser(filename)
        self.filename_format = filename
        self.remote_file_name_format = filename if remote_file_name is None else remote_file_name
        self.capture_stdout = capture_stdout
        self.capture_stderr = capture_stderr
        self.buffer_size = buffer_size
        self.should_log_traces = log_traces
        self.flush_interval = flush_interval
        self.overwrite, self.append = overwrite, append
        self.file: IO[str] | None = None
        self._run_name: str | None = None
        self._own_files: set[str] = set()  # written by this object, so it appends to them
        self._queue: deque[str | _Unread] = deque()
        self._lock = threading.RLock()  # other threads print too
        self._write_due = 0.0
        self._sync_due = 0.0  # fsync takes milliseconds, too long for a fast training step
        self._previous_hook: Any = None
        self._captures: list[tuple[Capture, LineAssembler]] = []
        self._start_capture()

    @property
    def filename(self) -> str:
        """The path of the file.

        Raises:
            RuntimeError: The run has not begun, so it has no name yet.
        """
        return format_name_with_dist(self.filename_format, self._known_run_name("filename"))

    @property
    def remote_file_name(self) -> str:
        """The name the file is stored under.

        Raises:
            RuntimeError: The run has not begun, so it has no name yet.
        """
        name = format_name_with_dist(self.remote_file_name_format, self._known_run_name("remote_file_name"))
        return name.replace(os.path.sep, "/").lstrip("/")

    def _known_run_name(self, attribute: str) -> str:
        if self._run_name is None:
            raise RuntimeError(f"`FileLogger.{attribute}` is not known before the run has begun (Event.INIT).")
        return self._run_name

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        for name, value in hyperparameters.items():
            self.write("[hyperparameter]: ", f"{name}: {format_log_data_value(value)} \n")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        prefix = f"[metric][batch={step}]: "
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
                value = DeferredValue(value.detach)
            if type(value) is DeferredValue:
                self._queue.append(_Unread(f"{prefix}{name}: ", value.hold()))
            else:
                self.write(prefix, f"{name}: {format_log_data_value(value)} \n")

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.write("[table]: ", f"{name}: {table_json(columns, rows)}\n")

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self.should_log_traces:
            for name, value in traces.items():
                self.write("[trace]: ", f"{name}:{format_log_data_value(value)}\n")

    def write(self, prefix: str, s: str) -> None:
        """Add lines to the file.

        Args:
            prefix: A prefix of each line.
            s: One or more lines.
        """
        self._queue.extend(f"{prefix}{line}\n" for line in s.removesuffix("\n").split("\n"))

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._run_name = state.run_name
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.filename in self._own_files or (self.append and not self.overwrite):
            mode = "a+"
        else:
            mode = "w+" if self.overwrite else "x+"
        try:
            self.file = path.open(mode, buffering=self.buffer_size, encoding="utf-8", errors="backslashreplace")
        except FileExistsError:
            self._stop_capture()
            raise FileExistsError(
                f"The log file {self.filename!r} exists. Use `FileLogger(overwrite=True)` to replace it, `append=True` "
                f"to append to it, or a `filename` that differs from run to run, for example with '{{run_name}}'."
            ) from None
        self._own_files.add(self.filename)
        self._start_capture()
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._write_out(wait=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batches % self.flush_interval == 0:
            self._flush(logger)
        elif self.file is not None and time.monotonic() >= self._write_due:
            self._write_out(wait=False)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._flush(logger)

    eval_start = fit_end = epoch_start

    def epoch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.epoch.value % self.flush_interval == 0:
            self._flush(logger)

    def close(self, state: State, logger: Logger) -> None:
        self._stop_capture()
        if self.file is None:
            return
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        self._sync_due = 0.0
        try:
            self._flush(logger)
        finally:
            self.file.close()
            self.file = None

    def _flush(self, logger: Logger) -> None:
        """Write everything to the disk, and pass the file to the loggers that store files."""
        if self.file is None:
            return
        self._write_out(wait=True)
        if time.monotonic() >= self._sync_due:
            self._sync()
        logger.upload_file(self.remote_file_name, self.filename, overwrite=True)

    def _sync(self) -> None:
        assert self.file is not None
        os.fsync(self.file.fileno())
        self._sync_due = time.monotonic() + _WRITE_SECONDS

    def _write_out(self, *, wait: bool) -> None:
        """Write the queue to the file.

        If the device has failed, the next training step raises its error; here the other lines are still written.

        Args:
            wait: Wait for values on the device; otherwise the queue is written up to the first such value.
        """
        assert self.file is not None
        self._write_due = time.monotonic() + _WRITE_SECONDS
        with self._lock:
            with contextlib.suppress(RuntimeError):
                DeferredValue.fetch(line.value for line in tuple(self._queue) if type(line) is _Unread)
            lines: list[str] = []
            while self._queue:
                line = self._queue[0]
                if isinstance(line, str):
                    lines.append(line)
                elif wait or line.value.ready:
                    try:
                        text = format_log_data_value(line.value)
                    except RuntimeError:
                        text = "(could not be read)"
                    lines.append(f"{line.start}{text} \n")
                else:
                    break
                self._queue.popleft()
            self.file.write("".join(lines))
            self.file.flush()

    # ---- output of the process ----

    def _start_capture(self) -> None:
        if self._captures:
            return
        for captured, stream, prefix in (
            (self.capture_stdout, sys.stdout, "[stdout]: "),
            (self.capture_stderr, sys.stderr, "[stderr]: "),
        ):
            if captured and stream is not None:  # None: the process has none, as under pythonw
                assembler = LineAssembler(partial(self.write, prefix))
                self._captures.append((Capture(stream, partial(self._feed, assembler)), assembler))

    def _feed(self, assembler: LineAssembler, text: str) -> None:
        with self._lock:
            assembler.feed(text)

    def _stop_capture(self) -> None:
        for capture, assembler in self._captures:
            capture.close()
            assembler.finish()
        self._captures = []

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Report the exception, which is captured, and write it to the disk before anything else can fail."""
        self._previous_hook(kind, error, traceback)
        if self.file is not None:
            self._write_out(wait=True)
            self._sync()


class Capture:
    """Capture of a stream: calls a function with everything that is written to it, until closed.

    The stream's `write` is replaced, not the stream, so objects that hold the stream (logging handlers, progress bars)
    are captured too.

    Args:
        stream: The stream, which still receives the text.
        sink: Called with the text. Not called in forked processes, such as the workers of a dataloader.
    """

    def __init__(self, stream: TextIO, sink: Callable[[str], None]) -> None:
        self._stream = stream
        self._sink = sink
        self._pid = os.getpid()
        self._active = True
        self._inherited = "write" not in vars(stream)
        self._original = stream.write
        self._replacement = self._write  # one object, which `close` compares with
        stream.write = self._replacement  # type: ignore[method-assign]

    def _write(self, text: str) -> int:
        written = self._original(text)
        if self._active and os.getpid() == self._pid:
            self._sink(text)
        return written

    def close(self) -> None:
        """Restore the stream's own `write`. A second call does nothing."""
        self._active = False
        if vars(self._stream).get("write") is not self._replacement:
            return  # replaced again after us: from now on we only pass text through
        if self._inherited:
            del self._stream.write
        else:
            self._stream.write = self._original  # type: ignore[method-assign]


class LineAssembler:
    """Assembler of lines from pieces of text, without text that a carriage return overwrites (of a progress bar).

    Args:
        sink: Called with each finished line, without its newline.
    """

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._rest = ""

    def feed(self, text: str) -> None:
        """Add the next piece."""
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            self._sink(_visible(line.removesuffix("\r")))
        # A carriage return at the very end may be the first half of a line end.
        self._rest = _visible(rest[:-1]) + "\r" if rest.endswith("\r") else _visible(rest)

    def finish(self) -> None:
        """Treat the rest, which has no newline, as a line."""
        rest, self._rest = self._rest.removesuffix("\r"), ""
        if rest:
            self._sink(rest)


def _visible(line: str) -> str:
    return line.rpartition("\r")[2].rstrip(" ") if "\r" in line else line
