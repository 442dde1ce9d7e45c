"""Retry operations that fail temporarily."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

TCallable = TypeVar("TCallable", bound=Callable[..., Any])
ExceptionTypes = type[Exception] | tuple[type[Exception], ...]

_JITTER = random.SystemRandom()  # jitter must not advance the seeded generator of the run


@overload
def retry(
    exc_class: ExceptionTypes = ...,
    num_attempts: int = ...,
    initial_backoff: float = ...,
    max_jitter: float = ...,
) -> Callable[[TCallable], TCallable]: ...


@overload
def retry(exc_class: TCallable) -> TCallable: ...


def retry(
    exc_class: Any = Exception, num_attempts: int = 3, initial_backoff: float = 1.0, max_jitter: float = 0.5
) -> Any:
    """Decorate a function so that it is called again after an exception; used as `@retry` or `@retry(...)`.

    After attempt i (from 0) there is a pause of `initial_backoff * 2**i` seconds plus a random jitter. If the function
    has a parameter `retry_index`, it gets i.

    Args:
        exc_class: The exceptions to retry after. Other exceptions, and that of the last attempt, are raised.
        num_attempts: The maximum number of calls, at least 1.
        initial_backoff: The length of the first pause in seconds.
        max_jitter: The maximum jitter in seconds.

    Raises:
        ValueError: `num_attempts` is below 1.

    Example:
        >>> @retry(KeyError, num_attempts=3, initial_backoff=0, max_jitter=0)
        ... def flaky(retry_index=0):
        ...     return {2: "third time"}[retry_index]
        >>> flaky()
        'third time'
    """
    if num_attempts < 1:
        raise ValueError(f"`num_attempts` must be at least 1, got {num_attempts!r}.")

    is_configured = isinstance(exc_class, (type, tuple))
    retried = exc_class if is_configured else Exception

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        takes_index = "retry_index" in inspect.signature(function).parameters

        @functools.wraps(function)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            for index in range(num_attempts):
                if takes_index:
                    kwargs["retry_index"] = index
                try:
                    return function(*args, **kwargs)
                except retried:
                    if index == num_attempts - 1:
                        raise
                    time.sleep(initial_backoff * 2**index + _JITTER.random() * max_jitter)

        return attempt

    return decorate if is_configured else decorate(exc_class)


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
