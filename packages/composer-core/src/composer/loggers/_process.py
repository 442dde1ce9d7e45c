"""What a logger with a thread must know of its process: whether it was forked, and when it ends."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

__all__ = ["call_at_exit", "call_in_time", "this_process"]

T = TypeVar("T")

_process = [object()]


def this_process() -> object:
    """Stands for this process: another object after a fork. `os.getpid` would take longer than all else of a call."""
    return _process[0]


def call_at_exit(method: Callable[[], None]) -> None:
    """Call a method when the process ends, unless its object is gone by then.

    A client, imported later, would close itself before a function of `atexit`, and all thread pools have ended by then.
    What registers with `threading` runs before. It has no public name; where it is gone, `atexit` is the next best.
    """
    import concurrent.futures.thread  # noqa: F401 - so that it has registered before us

    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)


def call_in_time(call: Callable[[], T], timeout: float, what: str) -> T:
    """Call a function of a service in a thread, and leave it alone if it takes too long.

    Args:
        call: The function.
        timeout: In seconds.
        what: What it does, for the message.

    Raises:
        TimeoutError: It took too long.
        Exception: What the function raised.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="composer-call", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        return call()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} has not ended in {timeout:.3g} seconds. Is the service reachable?")
    return results[0]


def _notice_fork() -> None:
    _process[0] = object()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_notice_fork)
