"""Retry operations that fail temporarily."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from composer.utils.delivery import DeliveryDeadline as DeliveryDeadline

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
