"""The signals that the launcher receives."""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any

# The signal that the ranks get. SIGHUP, when a terminal is closed, means: save and exit.
_FORWARDED = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGTERM}
_TORCH_HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # torch installs handlers for these in `start_processes`


class Signals:
    """Context manager that queues signals, and restores the previous handlers on exit."""

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _TORCH_HANDLED if hasattr(signal, name)]
            self._previous = {number: signal.getsignal(number) for number in numbers}
        return self

    def listen(self) -> None:
        """Install the handlers. Call it before the processes are started and again after: torch installs its own."""
        for number, previous in self._previous.items():
            forwards = signal.Signals(number).name in _FORWARDED and previous != signal.SIG_IGN  # ignored by nohup
            if forwards or previous is not None:
                signal.signal(number, self._on_signal if forwards else previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            if previous is not None:
                signal.signal(number, previous)

    @property
    def pending(self) -> bool:
        """True if a signal is in the queue."""
        return bool(self._queue)

    def take(self) -> int | None:
        """Return the next signal to forward to the ranks, or None."""
        return self._queue.popleft() if self._queue else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._queue.append(_FORWARDED[signal.Signals(number).name])
