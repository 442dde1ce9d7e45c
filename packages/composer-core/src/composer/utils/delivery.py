"""Wait for services at the end of a run: uploads and loggers that may fail or hang."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


class DeliveryDeadline:
    """A limit on the time that the end of a run waits for services (loggers, uploads) that fail or hang.

    The deadline of a service is `timeout` seconds after it started to fail: after the first failure without a later
    success, or, for a service that hangs, after its last progress or the start of the wait. A service that makes
    progress is waited for, however slow it is.

    Services that share a timeout (`for_service`) run concurrently, so time spent waiting for one that failed counts
    for the others as well: the total wait for all failing services is `timeout` seconds. It does not count for a
    service that made progress or got new work in the meantime.

    Args:
        timeout: The timeout in seconds.

    Raises:
        ValueError: `timeout` is not a positive, finite number.

    Example:
        >>> deadline = DeliveryDeadline(60.0)
        >>> deadline.failed()
        >>> 59 < deadline.left(waiting_since=time.monotonic()) <= 60
        True
    """

    def __init__(self, timeout: float) -> None:
        if not 0 < timeout < float("inf"):
            raise ValueError(f"`timeout` must be positive, got {timeout!r}. Pass a number of seconds.")
        self.timeout = timeout
        self._failing_since: float | None = None
        self._progress = float("-inf")
        self._seconds_lost = [0.0]  # shared by all services that share the timeout

    def for_service(self, timeout: float | None = None) -> DeliveryDeadline:
        """Return the deadline of one service, which shares the timeout of this object by default.

        Args:
            timeout: A separate timeout in seconds; None shares this one.
        """
        if timeout is not None:
            return DeliveryDeadline(timeout)
        deadline = DeliveryDeadline(self.timeout)
        deadline._seconds_lost = self._seconds_lost
        return deadline

    @property
    def failing(self) -> bool:
        """True if the last delivery failed."""
        return self._failing_since is not None

    def failed(self) -> None:
        """Record a failed delivery."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()

    def progressed(self) -> None:
        """Record a partial delivery, or new work for an idle service."""
        self._progress = time.monotonic()

    def delivered(self) -> None:
        """Record a complete delivery: the service no longer fails."""
        self._failing_since, self._progress = None, time.monotonic()

    def record_timeout(self, waiting_since: float) -> None:
        """Record a wait that timed out; later waits are immediately over until the next delivery."""
        begin = max(waiting_since, self._progress)
        self._seconds_lost[0] += time.monotonic() - begin
        self._failing_since = begin if self._failing_since is None else min(begin, self._failing_since)

    def left(self, waiting_since: float) -> float:
        """Return the remaining seconds to wait; not positive if the wait is over.

        Args:
            waiting_since: The start of the wait, by `time.monotonic`.
        """
        begin = max(waiting_since - self._seconds_lost[0], self._progress)
        if self._failing_since is not None:
            begin = min(begin, self._failing_since)
        return begin + self.timeout - time.monotonic()


def call_in_time(call: Callable[[], T], timeout: float, what: str) -> T:
    """Call a function of a service in a thread, and stop waiting for it after a timeout.

    Args:
        call: The function.
        timeout: In seconds.
        what: What the function does, for the message.

    Raises:
        TimeoutError: It took too long.
        BaseException: The exception that the function raised.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            result.set_exception(error)

    thread = threading.Thread(target=run, name="composer-call", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return call()
    if not wait([result], timeout).done:
        raise TimeoutError(
            f"{what} has not ended in {timeout:.3g} seconds. Check that the service runs and can be reached, or pass a "
            f"larger `delivery_timeout`."
        )
    return result.result()


def call_at_exit(method: Callable[[], None]) -> None:
    """Call a method when the process ends, unless its object has been collected by then.

    It runs before the functions registered with `atexit`: a client that is imported later would close itself before
    those, and all thread pools have ended by then. `threading._register_atexit`, which allows this, is not public;
    without it `atexit` is used. What was registered last runs first. An exception is printed.

    Args:
        method: A bound method. Its object is referenced weakly.
    """
    import concurrent.futures.thread  # noqa: F401 - so that its own exit function is registered before ours

    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            try:
                alive()
            except Exception:  # noqa: BLE001 - Python would skip the functions that come after this one
                sys.excepthook(*sys.exc_info())

    getattr(threading, "_register_atexit", atexit.register)(call)
