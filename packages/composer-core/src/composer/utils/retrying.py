"""Try again what may fail for a moment."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

__all__ = ["DeliveryDeadline", "retry"]

TCallable = TypeVar("TCallable", bound=Callable[..., Any])
ExceptionTypes = type[Exception] | tuple[type[Exception], ...]

_JITTER = random.SystemRandom()  # waiting must not advance the generator that a run is seeded with


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
    """Decorate a function so that it is called again when it raises; used as `@retry` or `@retry(...)`.

    Attempt i (from 0) is followed by a pause of `initial_backoff * 2**i` seconds and a random jitter. A function with a
    parameter `retry_index` is told i.

    Args:
        exc_class: The exceptions to try again after; others, and that of the last attempt, are raised.
        num_attempts: Calls at most, at least 1.
        initial_backoff: Seconds of the first pause.
        max_jitter: Upper limit of the jitter in seconds.

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
    """How long to wait for what is still queued for a service, so that one that fails does not hold up a finished run.

    A service is given up `timeout` seconds after it began to fail: after the first failure that was not followed by a
    success, or after the later of the last progress and the begin of the waiting. So a service that works is waited
    for, however slow it is.

    Services that share a deadline (`for_service`) work at the same time, so the time that was waited in vain for one of
    them counts for the others, too: for all that fail together the wait is `timeout` seconds. A service that has made
    progress meanwhile, or has been given something only then, loses nothing by it.

    Args:
        timeout: In seconds.

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
            raise ValueError(f"`timeout` must be positive, got {timeout!r}. Give a number of seconds.")
        self.timeout = timeout
        self._failing_since: float | None = None
        self._progress = float("-inf")
        self._in_vain = [0.0]  # seconds, of all services that share it

    def for_service(self, timeout: float | None = None) -> DeliveryDeadline:
        """Return the deadline of one service: one that shares this, or one of its own if it has an own timeout.

        Args:
            timeout: The own timeout, in seconds; None: that of this deadline, shared.
        """
        if timeout is not None:
            return DeliveryDeadline(timeout)
        deadline = DeliveryDeadline(self.timeout)
        deadline._in_vain = self._in_vain
        return deadline

    @property
    def failing(self) -> bool:
        """Whether the last that was heard of the service is a failure."""
        return self._failing_since is not None

    def failed(self) -> None:
        """Something was not delivered."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()

    def progressed(self) -> None:
        """A part of something was delivered, or the service is given something after it had nothing to do."""
        self._progress = time.monotonic()

    def delivered(self) -> None:
        """Something was delivered whole: the service does not fail any more."""
        self._failing_since, self._progress = None, time.monotonic()

    def waited_in_vain(self, waiting_since: float) -> None:
        """A wait has ended with the service failing or hanging: it is not waited for again until it delivers."""
        begin = max(waiting_since, self._progress)
        self._in_vain[0] += time.monotonic() - begin
        self._failing_since = begin if self._failing_since is None else min(begin, self._failing_since)

    def left(self, waiting_since: float) -> float:
        """The seconds left to wait, negative if none.

        Args:
            waiting_since: When the waiting began (monotonic).
        """
        begin = max(waiting_since - self._in_vain[0], self._progress)
        if self._failing_since is not None:
            begin = min(begin, self._failing_since)
        return begin + self.timeout - time.monotonic()
