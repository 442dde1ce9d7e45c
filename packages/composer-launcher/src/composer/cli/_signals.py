"""The signals that the launcher gets."""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

# What a signal to the launcher means for the ranks: a terminal that goes away is an order to save and leave.
_MEANING = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGTERM}
_TORCHS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # what torch takes over when it starts processes


class Signals:
    """Keeps signals for later instead of dying of them, and leaves the handlers as they were."""

    def __init__(self) -> None:
        self._came: deque[int] = deque()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                getattr(signal, name): signal.getsignal(getattr(signal, name))
                for name in _TORCHS
                if hasattr(signal, name)
            }
        return self

    def listen(self) -> None:
        """Take over; to be called before the processes are started, and once more after, since torch does so too."""
        for number, before in self._before.items():
            handles = signal.Signals(number).name in _MEANING and before != signal.SIG_IGN  # such as under nohup
            if handles or before is not None:
                signal.signal(number, self._on_signal if handles else before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)

    @property
    def waiting(self) -> bool:
        """Whether a signal came that was not taken."""
        return bool(self._came)

    def take(self) -> int | None:
        """The next signal, as it is for the ranks; None: there is none."""
        return self._came.popleft() if self._came else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came.append(_MEANING[signal.Signals(number).name])
