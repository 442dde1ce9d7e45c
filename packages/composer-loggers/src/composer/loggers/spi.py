"""Building blocks for a logger that sends to a service or writes a file without slowing the training step.

The loggers for Weights & Biases, MLflow and TensorBoard are made of these. A `Sender` sends metrics from a background
thread, and a `ServiceLogger` passes them to it; the functions below help with what such loggers have in common: images,
tables, files, timeouts, failures.

Example:
    A logger that sends the numbers of each step to `client`, which can be any service::

        from composer import Trainer
        from composer.loggers.spi import Sender, ServiceLogger, read_numbers
        from composer.utils import dist


        class MyLogger(ServiceLogger):
            def __init__(self, client):
                self._client = client

            def init(self, state, logger):
                if dist.get_global_rank() == 0:
                    self._sender = Sender(
                        "MyLogger", self._send, timeout=logger.delivery_deadline.for_service()
                    )

            def _send(self, records):  # called in the thread
                for record in records:
                    self._client.log(read_numbers(record.metrics), step=record.step, time=record.seconds)

            def post_close(self):
                if self._sender is not None:
                    self._sender.close()


        trainer = Trainer(
            model=model, train_dataloader=loader, max_duration="1ep", loggers=MyLogger(client)
        )
        trainer.fit()
        trainer.close()
"""

from __future__ import annotations

import copy
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from composer.core.deferred_value import DeferredValue, HostCopy
from composer.core.logging import LoggerDestination, format_log_data_value
from composer.utils.delivery import DeliveryDeadline as DeliveryDeadline
from composer.utils.delivery import call_at_exit as call_at_exit
from composer.utils.delivery import call_in_time as call_in_time
from composer.utils.numbers import check_finite

if TYPE_CHECKING:
    from composer.core.logging import Logger
    from composer.core.state import State

log = logging.getLogger(__name__)

Image = np.ndarray | torch.Tensor
ImageCopy = Callable[[], np.ndarray]
"""A copy of an array that may still be in progress; calling it waits for the copy and returns it."""

_NESTED = (torch.Tensor, np.ndarray, dict, list, tuple)
_IMMUTABLE = frozenset({float, int, str, bool, type(None)})
_FETCH_SECONDS = 0.25  # between two copies from the device, each of everything logged since the last one
_MAX_ARRAY = 1 << 20  # elements: a confusion matrix of 1024 classes
_MAX_RECORDS = 1024  # passed to the thread in one batch


class Logged(NamedTuple):
    """The metrics of one call of `log_metrics`, on the host.

    Attributes:
        metrics: Values by name.
        step: The number of trained batches.
        seconds: When they were logged, in seconds since 1970.
    """

    metrics: Mapping[str, Any]
    step: int
    seconds: float


class _Record(NamedTuple):
    call: Callable[[], object] | None  # None: metrics
    size: int
    metrics: Mapping[str, Any] = MappingProxyType({})
    step: int = 0
    seconds: float = 0.0
    arriving: Sequence[_PendingValue] = ()


class Sender:
    """A queue of metrics and calls for a service, and a background thread that sends them in order.

    - `put_metrics` and `put` return immediately. Values on a device are copied to the host in the background, all
      together and a few times a second; the thread waits for them, the training step does not.
    - The thread wakes every `interval` seconds and takes everything in the queue, so that it seldom competes with the
      training for the interpreter. Consecutive metrics are sent in one call.
    - The queue is bounded. If a service is too slow or unreachable, metrics and images are dropped while the queue is
      full, with one warning; a step never waits. Other calls (hyperparameters, files) are few and are never dropped.
    - A call that fails does not stop the later ones. The next method that the training thread calls reports the first
      failure: as a warning, or as an error, depending on `on_error`.

    The thread is a daemon, because another thread would keep the process alive while a service hangs. Instead, the end
    of the process waits for pending records, at most for `timeout`, before other libraries shut down.

    Args:
        name: The name of the logger, for messages.
        send_metrics: Sends metrics; called in the thread. It returns False if it only stored the
            metrics to send them later, which does not show that the service works. The same holds for calls.
        on_error: "warn" or "raise".
        interval: Seconds between two wake-ups of the thread.
        capacity: Size of the queue in KiB, approximately: eight metrics count as one, arrays by their size.
        timeout: How many seconds `flush`, `close` and the end of the process wait in total for a service that fails or
            hangs, or a deadline that is shared with other services; see `composer.utils.delivery.DeliveryDeadline`.
            Each record that arrives counts as progress.
        kept: Returns a sentence that says where undelivered data is stored; None if it is lost.

    Attributes:
        num_queued: The number of records put into the queue so far.
        num_dropped: The number of records dropped because the queue was full.

    Raises:
        ValueError: `on_error` is unknown, or a number is not positive.
    """

    def __init__(
        self,
        name: str,
        send_metrics: Callable[[Sequence[Logged]], object],
        *,
        on_error: str = "warn",
        interval: float = 0.5,
        capacity: int = 65536,
        timeout: float | DeliveryDeadline = 60.0,
        kept: Callable[[], str] | None = None,
    ) -> None:
        check_delivery_options(on_error)
        check_finite(interval=interval, capacity=capacity, above=0)
        self.name, self.on_error = name, on_error
        self._send_metrics, self._kept = send_metrics, kept
        self._interval, self._capacity = interval, capacity
        self._deadline = timeout if isinstance(timeout, DeliveryDeadline) else DeliveryDeadline(timeout)
        # Reentrant: a garbage collection while it is held may close an engine, which uses the sender again.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Record] = deque()
        self._on_device: list[_PendingValue] = []
        self._fetch_due = 0.0
        self.num_queued = self.num_dropped = 0
        self._size = self._done = self._failed = 0
        self._wake = self._closed = self._reported = self._drop_reported = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def pending(self) -> int:
        """The number of records that are not sent yet."""
        return self.num_queued - self._done

    @property
    def seconds_left(self) -> float:
        """The seconds to wait for a service that makes no progress; 0 if it has failed for too long."""
        if not (self.pending or self._deadline.failing):
            return self._deadline.timeout
        return max(0.0, self._deadline.left(time.monotonic()))

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the sender's process, which alone may send."""
        return self._process != os.getpid()

    def put_metrics(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        """Queue a snapshot of metrics, and return it.

        Args:
            metrics: Numbers, tensors, `DeferredValue` objects; anything else is copied by `copy.deepcopy`.
            step: The number of trained batches.

        Returns:
            The snapshot. Values that are still on the device can be read with `read_numbers`.
        """
        arriving: list[_PendingValue] = []
        arrays: list[Any] = []
        values = {k: v if type(v) in _IMMUTABLE else _snapshot(v, arriving, arrays) for k, v in metrics.items()}
        size = 1 + len(metrics) // 8
        if arrays:
            size += sum(getattr(a, "nbytes", 0) for a in arrays) // 1024
        self._append(_Record(None, size, values, step, time.time(), arriving), may_drop=True)
        if self._on_device and time.monotonic() >= self._fetch_due:
            self.fetch()
        if self._failure is not None:
            self.check()
        return values

    def put(self, call: Callable[[], object], *, size: int = 1, may_drop: bool = False, check: bool = True) -> None:
        """Queue a call.

        Args:
            call: The function to call in the thread.
            size: The memory it refers to, in KiB.
            may_drop: True if it may be dropped when the queue is full.
            check: Report an earlier failure, as `check` does, once this call is queued.

        Raises:
            RuntimeError: An earlier call failed and `on_error` is "raise"; or the sender is closed, or belongs to the
                process this one was forked from.
        """
        self._append(_Record(call, size), may_drop=may_drop)
        if check:
            self.check()

    def put_images(self, images: Sequence[Image], send: Callable[[Sequence[ImageCopy]], None]) -> None:
        """Queue images; they are dropped if the queue is full.

        Args:
            images: Arrays of any shape, on any device; they may be changed afterwards.
            send: Sends the images; called in the thread with a function for each image, which waits for its copy and
                returns it: floats in [0, 1] (an image beyond that range, such as a normalized one, is scaled to it; NaN
                becomes 0), integers as `uint8`, or booleans.
        """
        size = 1 + sum(math.prod(image.shape) for image in images) * 4 // 1024
        copies = [partial(_read_image, start_copy(image)) for image in images]
        self.put(partial(send, copies), size=size, may_drop=True)

    def fetch(self) -> None:
        """Start copying logged values from the device to the host, without waiting. Call it in the training thread."""
        with self._changed:
            arriving, self._on_device = self._on_device, []
            self._fetch_due = time.monotonic() + _FETCH_SECONDS
            with suppress(Exception):  # the device failed, as `locate` will note; earlier records are still sent
                DeferredValue.fetch(a.value for a in arriving if a.value is not None)
            for a in arriving:
                a.locate()

    def wake(self) -> None:
        """Make the thread send what is queued now, instead of after `interval`. Does not wait for it."""
        if self.forked:
            return
        self.fetch()
        with self._changed:
            self._wake = True
            self._changed.notify_all()

    def flush(self, *, check: bool = True) -> bool:
        """Wait until everything has been sent, or has failed.

        Args:
            check: Report a failure, as `check` does.

        Returns:
            True if that was within the timeout.
        """
        if self.forked:
            return False  # nothing may be locked here: the lock may have been held at the fork
        self.fetch()
        with self._changed:
            target = self.num_queued
            self._wake = True
            self._changed.notify_all()
            if self._thread is None:
                self._send_all()
            # Garbage collection may close an engine in the sender's own thread, which must not wait for itself.
            elif threading.current_thread() is not self._thread:
                since = time.monotonic()
                while self._done < target and (left := self._deadline.left(since)) > 0:
                    done = self._done
                    self._changed.wait_for(lambda: self._done > done, left)  # noqa: B023 - called before it changes
                if self._done < target or self._deadline.failing:
                    self._deadline.record_timeout(since)  # later calls do not wait once more
            arrived = self._done >= target
        if not arrived:
            text = "`%s` could not send everything in %g seconds: %d records wait."
            log.warning(text, self.name, self._deadline.timeout, self.pending)
        if check:
            self.check()
        return arrived

    def check(self) -> None:
        """Report the first failure, once: as a warning, or as a RuntimeError."""
        if self._failure is not None and not self._reported:
            self._reported = True
            report_failure(self.name, self._failure, self.on_error)

    def close(self) -> None:
        """Send everything, as `flush` does, and stop the thread. A second call does nothing."""
        if self._closed or self.forked:
            return
        arrived = self.flush(check=False)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and arrived and threading.current_thread() is not self._thread:
            self._thread.join(self._deadline.timeout)
        lost = self.num_dropped + self._failed + self.pending
        if lost:
            kept = "They are not kept." if self._kept is None else self._kept()
            text = "`%s` did not deliver %d of %d records. %s"
            log.warning(text, self.name, lost, self.num_queued + self.num_dropped, kept)
        self.check()

    def _append(self, record: _Record, *, may_drop: bool) -> None:
        if self._closed or self.forked:
            raise RuntimeError(
                f"`{self.name}` cannot log any more: it is closed, or belongs to the process this one was forked from."
            )
        with self._lock:  # faster than through the condition, whose methods are in Python
            size = self._size + record.size
            if may_drop and size > self._capacity:
                self.num_dropped += 1
            else:
                if not self.pending:
                    self._deadline.progressed()  # the service had nothing to do: not a failure
                self._queue.append(record)
                self.num_queued += 1
                self._size = size
                if record.arriving:
                    self._on_device.extend(record.arriving)
                if self._thread is None:
                    self._start()
                if size > self._capacity // 2 and not self._wake:
                    self._wake = True
                    self._changed.notify_all()
                return
        if not self._drop_reported:
            self._drop_reported = True
            warnings.warn(
                f"`{self.name}` cannot send as fast as the run logs: its queue is full, so metrics and images are "
                f"dropped until there is room. Is the service reachable? Log less often if it is only slow.",
                stacklevel=5,
            )

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"composer-{self.name}", daemon=True)
        with suppress(RuntimeError):  # the interpreter is shutting down: `flush` sends in its own thread
            call_at_exit(self._finish_at_exit)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wake or self._closed, self._interval)
                self._wake = False
            self._send_all()
            with self._changed:
                if self._closed and not self._queue:
                    return

    def _send_all(self) -> None:
        while records := self._take():
            self._deliver(records)

    def _take(self) -> list[_Record]:
        """Remove and return the next call, or consecutive metrics whose copies to the host have been started."""
        taken: list[_Record] = []
        with self._changed:
            while self._queue and len(taken) < _MAX_RECORDS and not (taken and taken[0].call):
                record = self._queue[0]
                if (taken and record.call) or (record.arriving and any(a.value is not None for a in record.arriving)):
                    break
                taken.append(self._queue.popleft())
        return taken

    def _deliver(self, records: list[_Record]) -> None:
        """Make one call, or send metrics."""
        count = len(records)
        failed = self._failed
        result: object = None
        try:
            call = records[0].call
            if call is not None:
                result = call()
            elif arrived := self._arrived(records):
                count = len(arrived)
                result = self._send_metrics(arrived)
        except Exception as error:  # noqa: BLE001 - reported in the training thread
            self._failed += count
            self._failure = self._failure or error
        finally:
            with self._changed:
                if self._failed > failed:
                    self._deadline.failed()
                elif result is not False:
                    self._deadline.delivered()
                self._done += len(records)
                self._size -= sum(record.size for record in records)
                self._changed.notify_all()

    def _arrived(self, records: Sequence[_Record]) -> list[Logged]:
        """Return the metrics with all values on the host, without records whose copies failed."""
        arrived: list[Logged] = []
        for record in records:
            metrics = record.metrics
            try:
                if record.arriving:
                    metrics = {k: v.read() if type(v) is _PendingValue else v for k, v in metrics.items()}
                arrived.append(Logged(metrics, record.step, record.seconds))
            except Exception as error:  # noqa: BLE001 - reported in the training thread
                self._failed += 1
                self._failure = self._failure or error
        return arrived

    def _finish_at_exit(self) -> None:
        if not (self.forked or self._closed):
            self.flush(check=False)
            if self._failure is not None and not self._reported:
                log.error("`%s` failed: %s", self.name, self._failure)


class ServiceLogger(LoggerDestination):
    """Base class of loggers that send metrics to a service: when they queue, copy and wait for values.

    A subclass sets `_sender` at INIT, on ranks that log, and closes it in `post_close`. Values on the device are also
    copied at the end of an epoch and around an evaluation. The ends of `fit` and of the run wait for queued data.

    Attributes:
        _sender: The sender; None outside of a run, and on ranks that do not log. These still compute the metrics,
            because that may be a collective operation.
        _training: True while `fit` runs, and after it has failed.
    """

    accepts_deferred: ClassVar[bool] = True  # values stay on the device until the thread sends them
    _sender: Sender | None = None
    _training = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread, which cannot be copied."""
        return {**vars(self), "_sender": None}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._sender is None:
            hold_metrics(metrics)
        else:
            self._sender.put_metrics(metrics, 0 if step is None else step)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._training = True

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self._sender.fetch()  # it may be a while until something is logged again

    eval_start = eval_end = epoch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        self._training = False
        if self._sender is not None:
            self._sender.flush()

    def close(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self._sender.flush(check=False)


class _PendingValue:
    """A value on the device, or on its way to the host.

    The training thread reads the same `DeferredValue` for other loggers, so the sending thread never touches one.
    """

    __slots__ = ("failure", "reader", "value")

    def __init__(self, value: DeferredValue) -> None:
        self.value: DeferredValue | None = value
        self.reader: Callable[[], Any] | None = None
        self.failure: Exception | None = None

    def locate(self) -> None:
        """Start the copy to the host unless it runs already, and release the `DeferredValue`."""
        if self.value is None:
            return
        try:
            self.reader = self.value.reader()
        except Exception as error:  # noqa: BLE001 - the training thread gets it when it waits for the device
            self.failure = error
        self.value = None

    def read(self) -> Any:
        """Return the number, or an array. Waits for the copy, and raises if it failed."""
        if self.failure is not None:
            raise self.failure
        assert self.reader is not None, "values are located before their record is sent"
        return self.reader()


def _snapshot(value: Any, pending: list[_PendingValue], arrays: list[Any]) -> Any:
    """Return a value as it is now; add values on the device to `pending`, and other large ones to `arrays`."""
    if type(value) is DeferredValue:
        number = value.cpu_number()
        if number is not None:
            return number
    else:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, torch.Tensor):
            arrays.append(copy.deepcopy(value))
            return arrays[-1]
        if value.device.type != "cpu":
            value = DeferredValue(value.detach)
        elif value.numel() == 1:
            return value.item()
        else:
            arrays.append(value.detach().clone())
            return arrays[-1]
    value.hold()
    if value.ready:
        plain = value.plain
        if isinstance(plain, torch.Tensor):
            plain = plain.detach()
            arrays.append(plain)
        return plain
    pending_value = _PendingValue(value)
    if value.tensor is not None and value.tensor.numel() != 1:
        arrays.append(value.tensor)
        pending_value.locate()
    pending.append(pending_value)
    return pending_value


# ---- values ----


def hold_metrics(metrics: Mapping[str, Any]) -> None:
    """Compute metrics that are computed on demand. Call it on ranks that do not log: it may be a collective operation.

    Args:
        metrics: As given to `log_metrics`.
    """
    for value in metrics.values():
        if type(value) is DeferredValue:
            value.hold()


def flatten_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace dictionaries, and lists that hold arrays, by an entry for each of their values.

    Args:
        metrics: Values by name, such as the curves of a metric for each class. The names of new entries end in the key
            or the index: "curve/0".
    """
    if not any(isinstance(value, dict | list | tuple) for value in metrics.values()):
        return metrics
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        members = value if isinstance(value, dict) else {}
        if isinstance(value, list | tuple) and any(isinstance(v, _NESTED) for v in value):
            members = dict(enumerate(value))
        if members:
            flat |= flatten_metrics({f"{name}/{key}": member for key, member in members.items()})
        else:
            flat[name] = value
    return flat


def read_arrays(records: Sequence[Logged]) -> dict[str, tuple[int, np.ndarray]]:
    """Return the last array of each name, such as a confusion matrix, with its step; see `flatten_metrics`.

    An array of more than 2**20 elements is left out, with a message in the log.

    Args:
        records: As the `Sender` passes them.
    """
    arrays: dict[str, tuple[int, np.ndarray]] = {}
    for metrics, step, _ in records:
        for name, value in flatten_metrics(metrics).items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 1:
                value = (value.float() if value.dtype is torch.bfloat16 else value).detach().cpu().numpy()
            if isinstance(value, np.ndarray) and value.size > 1 and value.dtype.kind in "biuf":
                if value.size <= _MAX_ARRAY:
                    arrays[str(name)] = step, value
                else:
                    log.warning("The array %s, of shape %s, is too large to be logged.", name, value.shape)
    return arrays


def read_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are single numbers, as floats. Waits for values that are on their way from the device.

    Args:
        metrics: A snapshot made by `Sender.put_metrics`, or `Logged.metrics`. Dictionaries are flattened
            as by `flatten_metrics`. Text and larger arrays are left out. An integer beyond the range of floats becomes
            infinite.
    """
    flat = flatten_metrics(metrics)
    numbers = {str(k): v if type(v) is float else _as_number(v) for k, v in flat.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def _as_number(value: Any) -> float | None:
    if type(value) is _PendingValue:
        value = value.read()
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def start_copy(value: Image) -> ImageCopy:
    """Start copying an array to the host, without waiting for the device.

    Args:
        value: The array. It may be changed afterwards.

    Returns:
        A function that waits for the copy and returns it; half-precision tensors become float32.
    """
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: array
    tensor = value.detach().float() if value.dtype in (torch.bfloat16, torch.float16) else value.detach()
    if tensor.device.type == "cpu":
        host = tensor.clone()
        return host.numpy
    copied = HostCopy(tensor)
    return lambda: copied.wait().numpy()


def list_images(images: Image | Sequence[Image]) -> Sequence[Image]:
    """Return the images given to `log_images` as a sequence.

    Args:
        images: One array or a sequence of them; an array has shape (H, W), (C, H, W) or (N, C, H, W).

    Raises:
        ValueError: An array has another number of dimensions.
    """
    arrays = images if isinstance(images, Sequence) else [images]
    for array in arrays:
        if array.ndim not in (2, 3, 4):
            raise ValueError(f"`images` must have 2 to 4 dimensions, got shape {tuple(array.shape)}.")
    return arrays


def _read_image(read: ImageCopy) -> np.ndarray:
    return _in_unit_range(read())


def _in_unit_range(image: np.ndarray) -> np.ndarray:
    """Scale an image of floats to [0, 1] if it exceeds that range; integers are clipped to `uint8`."""
    if np.issubdtype(image.dtype, np.integer):
        return image if image.dtype == np.uint8 else np.clip(image, 0, 255).astype(np.uint8)
    if not np.issubdtype(image.dtype, np.floating):
        return image
    finite = image[np.isfinite(image)]
    if finite.size == 0:
        return np.zeros_like(image)
    low, high = float(finite.min()), float(finite.max())
    if low < 0 or high > 1:
        width = high - low
        image = (image - low) / (width if width > 0 else 1)
    scaled: np.ndarray = np.nan_to_num(image, nan=0.0, posinf=1.0, neginf=0.0)
    return scaled


def table_cell(value: Any) -> int | float | str | None:
    """Return a cell of a table as a number, text or None; anything else as formatted text."""
    return value if isinstance(value, int | float | str | None) else format_log_data_value(value)


# ---- files ----


class HeldFiles:
    """Files that are to be sent later, protected from being deleted or replaced until then."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def hold(self, path: Path, name: str) -> Path:
        """Hard-link a file into a hidden folder next to it (or copy it where links are not supported).

        Args:
            path: The file.
            name: The name of the link, without folders.

        Returns:
            The path of the link. Pass it to `release` once the file has been sent.
        """
        held = Path(tempfile.mkdtemp(prefix=".held-", dir=path.parent)) / name
        path = path.resolve()  # a link to a relative link would not resolve from another folder
        try:
            os.link(path, held)
        except OSError:
            shutil.copyfile(path, held)
        self._paths = [other for other in self._paths if other.exists()] + [held]
        return held

    @staticmethod
    def release(held: Path) -> None:
        """Remove a path that `hold` returned; do nothing if it is gone."""
        held.unlink(missing_ok=True)
        if held.parent.exists():
            held.parent.rmdir()

    def describe(self, rest: str) -> str:
        """Return `rest` and, if some files were not sent, a sentence that says where they are.

        Args:
            rest: A sentence about all other data.
        """
        unsent = [str(path) for path in self._paths if path.exists()]
        return f"{rest} The files to be sent are kept: {', '.join(unsent)}." if unsent else rest


# ---- failures and the end of the process ----


def import_client(module: str, logger: str) -> Any:
    """Import the client of a service when its logger is constructed.

    Args:
        module: The name of the module, which is also the name to install it by.
        logger: The name of the logger, for the message.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        message = f"`{logger}` needs `{module}`, which is not installed. Run `pip install {module}`."
        raise ModuleNotFoundError(message, name=module) from error


def check_delivery_options(on_error: str, delivery_timeout: float | None = None) -> None:
    """Check the arguments `on_error` and `delivery_timeout` of a logger.

    Raises:
        ValueError: `on_error` is unknown, or `delivery_timeout` is neither None nor a positive, finite number.
    """
    if on_error not in ("warn", "raise"):
        raise ValueError(f"`on_error` must be 'warn' or 'raise', got {on_error!r}.")
    if delivery_timeout is not None and not 0 < delivery_timeout < math.inf:
        raise ValueError(f"`delivery_timeout` must be positive, got {delivery_timeout!r}.")


def report_failure(name: str, failure: Exception, on_error: str) -> None:
    """Warn that a logger has failed, or raise an error.

    Args:
        name: The name of the logger.
        failure: The exception.
        on_error: "warn" or "raise".

    Raises:
        RuntimeError: `on_error` is "raise".
    """
    message = f"`{name}` failed to log: {type(failure).__name__}: {failure}"
    if on_error == "raise":
        raise RuntimeError(f"{message} Pass `on_error='warn'` to continue training without it.") from failure
    warnings.warn(
        f"{message} The run continues; this is not reported again. Pass `on_error='raise'` to stop the run instead.",
        stacklevel=5,
    )


def end_in_time(end: Callable[[float], object], deadline: DeliveryDeadline, what: str, grace: float = 0.0) -> None:
    """End a run of a service within the time that its deadline leaves, but at least a tenth of the timeout.

    Args:
        end: The function that ends the run; called with that time in seconds.
        deadline: The deadline of the service.
        what: What the function does, for the message.
        grace: Seconds by which the function may exceed its time, because it limits itself.

    Raises:
        TimeoutError: It took too long.
        BaseException: The exception that the function raised.
    """
    since = time.monotonic()
    seconds = max(deadline.left(since), deadline.timeout / 10)
    try:
        call_in_time(partial(end, seconds), seconds + grace, what)
    except TimeoutError:
        deadline.record_timeout(since)
        raise
