"""Training time: when a run is over, and the wall clock."""

from __future__ import annotations

import datetime
import time
from typing import Any

from composer.core import State, Time

__all__ = ["StepTimer", "is_over"]


def is_over(state: State, limit: Time[Any] | None = None) -> bool:
    """Return True if the run has reached a limit. Called every step, so it compares plain numbers.

    Args:
        state: The run's state.
        limit: The limit; None: `state.max_duration`.
    """
    if limit is None:
        limit = state.max_duration
    if limit is None:
        return False
    return bool(state.timestamp._count(limit._unit) >= limit._value)


class StepTimer:
    """Measures wall-clock time between calls, pausing on demand."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Start the next lap now; the time since the last lap is dropped."""
        self._last = time.perf_counter()

    def lap(self) -> datetime.timedelta:
        """Return the time since the last lap or restart."""
        now = time.perf_counter()
        elapsed = datetime.timedelta(seconds=now - self._last)
        self._last = now
        return elapsed
