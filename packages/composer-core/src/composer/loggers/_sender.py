"""Sends what is logged from a thread, so that training goes on."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from composer.loggers._deferred import DeferredValue, _Copy
from composer.loggers._process import call_at_exit, this_process
from composer.loggers._snapshots import Arriving, read_metrics, snapshot
from composer.utils.retrying import DeliveryDeadline

__all__ = ["Logged", "Sender", "check_on_error", "hold_metrics", "read_metrics", "report_failure", "start_copy"]

log = logging.getLogger(__name__)

_IMMUTABLE = frozenset({float, int, str, bool, type(None)})
_FETCH_SECONDS = 0.25  # between two copies from the device, each of everything logged since
_MOST_AT_ONCE = 1024  # records given to the thread in one go


class Logged(NamedTuple):
    """What one call of `log_metrics` logged, on the host."""

    metrics: Mapping[str, Any]
    step: int
    seconds: float  # since 1970, when it was logged


class _Record(NamedTuple):
    call: Callable[[], None] | None  # None: metrics
    size: int
    metrics: Mapping[str, Any] = MappingProxyType({})
    step: int = 0
    seconds: float = 0.0
    arriving: Sequence[Arriving] = ()


class Sender:
    """Carries metrics and calls to a service in a thread of its own, in the order in which they were given.

    - `put_metrics` and `put` return at once. Values on a device are copied to the host in the background, a few times a
      second and all of them together; the thread waits for them, the step does not.
    - The thread wakes every `interval` seconds and takes everything there is, so that it seldom gets in the way of the
      training, with which it shares the interpreter. Metrics that follow each other are sent in one call.
    - The queue is bounded. When a service is too slow or gone, what may be dropped (metrics, images) is dropped while
      it is full, with one warning, and the step never waits. Other calls (hyperparameters, files) are few and are kept.
    - A call that fails does not stop the later ones. The first failure becomes a warning, or an error if `on_error`
      says so, of whatever is called next in the training's thread.
    The thread is a daemon: another would keep a process alive whose service hangs. Instead, a process that ends waits
    for what is pending, at most for `timeout`, before libraries put away what they need for sending.

    Args:
        name: Who sends, for messages.
        send_metrics: Sends metrics; called in the thread.
        on_error: "warn" or "raise".
        interval: Seconds for which metrics gather before they are sent.
        capacity: What the queue holds, in KiB, roughly: eight metrics count as one, arrays by their size.
        timeout: How long `flush`, `close` and the end of the process wait in all for a service that fails or hangs, in
            seconds, or a deadline that is shared with other services; see `composer.utils.retrying.DeliveryDeadline`.
            Each record that arrives is progress.
        kept: Returns a sentence that says where what is not delivered is kept; None if it is not.

    Raises:
        ValueError: `on_error` is unknown, or a number is not positive.
    """

    def __init__(
        self,
        name: str,
        send_metrics: Callable[[Sequence[Logged]], None],
        *,
        on_error: str = "warn",
        interval: float = 0.5,
        capacity: int = 65536,
        timeout: float | DeliveryDeadline = 60.0,
        kept: Callable[[], str] | None = None,
    ) -> None:
        check_on_error(on_error)
        for argument, value in (("interval", interval), ("capacity", capacity)):
            if value <= 0:
                raise ValueError(f"`{argument}` must be positive, got {value!r}.")
        self.name, self.on_error = name, on_error
        self._send_metrics, self._kept = send_metrics, kept
        self._interval, self._capacity = interval, capacity
        self._deadline = timeout if isinstance(timeout, DeliveryDeadline) else DeliveryDeadline(timeout)
        # Reentrant: a garbage collection while it is held may close an engine, and so come here again.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Record] = deque()
        self._on_device: list[Arriving] = []
        self._fetch_due = 0.0
        self._size = self._put = self._done = self._dropped = self._failed = 0
        self._wanted = self._closed = self._reported = self._drop_reported = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._process = this_process()

    @property
    def pending(self) -> int:
        """How many records wait."""
        return self._put - self._done

    @property
    def seconds_left(self) -> float:
        """How long to wait now for a service that does nothing; 0 if it has failed for too long."""
        if not (self.pending or self._deadline.failing):
            return self._deadline.timeout
        return max(0.0, self._deadline.left(time.monotonic()))

    @property
    def forked(self) -> bool:
        """Whether this process was forked from that of the sender, which alone may send."""
        return self._process is not this_process()

    def put_metrics(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        """Queue a snapshot of metrics: numbers, tensors, `DeferredValue`, others by deep copy; and return it."""
        arriving: list[Arriving] = []
        arrays: list[Any] = []
        taken = {k: v if type(v) in _IMMUTABLE else snapshot(v, arriving, arrays) for k, v in metrics.items()}
        size = 1 + len(metrics) // 8
        if arrays:
            size += sum(getattr(a, "nbytes", 0) for a in arrays) // 1024
        self._append(_Record(None, size, taken, step, time.time(), arriving), may_drop=True)
        if self._on_device and time.monotonic() >= self._fetch_due:
            self.fetch()
        if self._failure is not None:
            self.check()
        return taken

    def put(self, call: Callable[[], None], *, size: int = 1, may_drop: bool = False, check: bool = True) -> None:
        """Queue a call.

        Args:
            call: What to do in the thread.
            size: What it holds in memory, in KiB.
            may_drop: Whether it may be left out when the queue is full.
            check: Whether to report a failure, as `check` does, once this call is queued.

        Raises:
            RuntimeError: An earlier one failed and `on_error` is "raise"; or the sender is closed, or belongs to the
                process this one was forked from.
        """
        self._append(_Record(call, size), may_drop=may_drop)
        if check:
            self.check()

    def fetch(self) -> None:
        """Start copying to the host what is still on the device, without waiting. For the training's thread only."""
        with self._changed:
            arriving, self._on_device = self._on_device, []
            self._fetch_due = time.monotonic() + _FETCH_SECONDS
            with suppress(Exception):  # the device has failed; `settle` meets that again, and what came before is sent
                DeferredValue.fetch(a.value for a in arriving if a.value is not None)
            for a in arriving:
                a.settle()

    def flush(self, *, check: bool = True) -> bool:
        """Wait until everything has been sent, or at least tried; returns whether that was in time.

        Args:
            check: Whether to report a failure, as `check` does.
        """
        if self.forked:
            return False  # forked; nothing may be locked here, because the lock may have been held
        self.fetch()
        with self._changed:
            target = self._put
            self._wanted = True
            self._changed.notify_all()
            if self._thread is None:
                self._work_off()
            elif threading.current_thread() is not self._thread:  # as when it collects the garbage of an engine
                since = time.monotonic()
                while self._done < target and (left := self._deadline.left(since)) > 0:
                    done = self._done
                    self._changed.wait_for(lambda: self._done > done, left)  # noqa: B023 - called before it changes
                if self._done < target or self._deadline.failing:
                    self._deadline.waited_in_vain(since)  # later calls do not wait once more
            arrived = self._done >= target
        if not arrived:
            late = "`%s` could not send everything in %g seconds: %d records wait."
            log.warning(late, self.name, self._deadline.timeout, self.pending)
        if check:
            self.check()
        return arrived

    def check(self) -> None:
        """Report the first failure, once: a warning, or a RuntimeError. Costs next to nothing."""
        if self._failure is not None and not self._reported:
            self._reported = True
            report_failure(self.name, self._failure, self.on_error)

    def close(self) -> None:
        """Send everything, as `flush`, and end the thread. A second call does nothing."""
        if self._closed or self.forked:
            return
        arrived = self.flush(check=False)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and arrived and threading.current_thread() is not self._thread:
            self._thread.join(self._deadline.timeout)
        lost = self._dropped + self._failed + self.pending
        if lost:
            kept = "They are not kept." if self._kept is None else self._kept()
            text = "`%s` did not deliver %d of %d records. %s"
            log.warning(text, self.name, lost, self._put + self._dropped, kept)
        self.check()

    # ---- how ----

    def _append(self, record: _Record, *, may_drop: bool) -> None:
        if self._closed or self._process is not this_process():
            raise RuntimeError(
                f"`{self.name}` cannot log any more: it is closed, or belongs to the process this one was forked from."
            )
        with self._lock:  # that of the condition, whose own methods are in Python
            size = self._size + record.size
            if may_drop and size > self._capacity:
                self._dropped += 1
            else:
                if not self.pending:
                    self._deadline.progressed()  # it may not have been heard of for long
                self._queue.append(record)
                self._put += 1
                self._size = size
                if record.arriving:
                    self._on_device.extend(record.arriving)
                if self._thread is None:
                    self._start()
                if size > self._capacity // 2 and not self._wanted:
                    self._wanted = True
                    self._changed.notify_all()
                return
        if not self._drop_reported:
            self._drop_reported = True
            warnings.warn(
                f"`{self.name}` does not get rid of what is logged: its queue is full, so metrics and images are "
                f"dropped until there is room. Is the service reachable? Log less often if it is only slow.",
                UserWarning,
                stacklevel=5,
            )

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"composer-{self.name}", daemon=True)
        with suppress(RuntimeError):  # the interpreter is about to end: then `flush` does the work itself
            call_at_exit(self._finish_at_exit)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, self._interval)
                self._wanted = False
            self._work_off()
            with self._changed:
                if self._closed and not self._queue:
                    return

    def _work_off(self) -> None:
        while records := self._take():
            self._deliver(records)

    def _take(self) -> list[_Record]:
        """The next call, or the next metrics as far as their values are on the way."""
        taken: list[_Record] = []
        with self._changed:
            while self._queue and len(taken) < _MOST_AT_ONCE and not (taken and taken[0].call):
                record = self._queue[0]
                if (taken and record.call) or (record.arriving and any(a.value is not None for a in record.arriving)):
                    break
                taken.append(self._queue.popleft())
        return taken

    def _deliver(self, records: list[_Record]) -> None:
        """Carry out one call, or send metrics."""
        count = len(records)
        failed = self._failed
        try:
            call = records[0].call
            if call is not None:
                call()
            elif arrived := self._arrived(records):
                count = len(arrived)
                self._send_metrics(arrived)
        except Exception as error:  # noqa: BLE001 - reported in the training thread
            self._failed += count
            self._failure = self._failure or error
        finally:
            with self._changed:
                if self._failed > failed:
                    self._deadline.failed()
                else:
                    self._deadline.delivered()
                self._done += len(records)
                self._size -= sum(record.size for record in records)
                self._changed.notify_all()

    def _arrived(self, records: Sequence[_Record]) -> list[Logged]:
        """The metrics, but for those whose copies failed, as they do once the device has failed."""
        arrived: list[Logged] = []
        for record in records:
            metrics = record.metrics
            try:
                if record.arriving:
                    metrics = read_metrics(metrics)
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


def start_copy(value: np.ndarray | torch.Tensor) -> Callable[[], np.ndarray]:
    """Take a snapshot of an array without waiting for the device. What is returned waits, and returns the snapshot."""
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: array
    tensor = value.detach().float() if value.dtype in (torch.bfloat16, torch.float16) else value.detach()
    if tensor.device.type == "cpu":
        host = tensor.clone()
        return host.numpy
    copied = _Copy(tensor)

    def read() -> np.ndarray:
        if copied._event is not None:
            copied._event.synchronize()
        return copied._host.numpy()

    return read


def hold_metrics(metrics: dict[str, Any]) -> None:
    """Compute what is computed on demand, on a rank that does not log it: that may take all ranks."""
    for value in metrics.values():
        if type(value) is DeferredValue:
            value.hold()


def check_on_error(on_error: str) -> None:
    """Raise a ValueError if the argument of this name is unknown."""
    if on_error not in ("warn", "raise"):
        raise ValueError(f"`on_error` must be 'warn' or 'raise', got {on_error!r}.")


def report_failure(name: str, failure: Exception, on_error: str) -> None:
    """Warn that a logger has failed, or raise a RuntimeError, as `on_error` says."""
    message = f"`{name}` failed to log: {type(failure).__name__}: {failure}"
    if on_error == "raise":
        raise RuntimeError(f"{message} Pass `on_error='warn'` to train on without it.") from failure
    warnings.warn(
        f"{message} The run goes on; this is not reported again. Pass `on_error='raise'` to stop the run instead.",
        UserWarning,
        stacklevel=5,
    )
