"""Intervals of callbacks that act before a batch is trained."""

from __future__ import annotations

from typing import Any, SupportsIndex

from composer.core import State, Time, TimeUnit, ensure_time


def in_batches_or_epochs(interval: SupportsIndex | str | Time[Any], int_unit: TimeUnit = TimeUnit.BATCH) -> Time[Any]:
    """Convert an interval in batches or epochs to a `Time`.

    Args:
        interval: The interval.
        int_unit: The unit of a plain number.

    Raises:
        ValueError: `interval` has another unit or is not positive.
    """
    time = ensure_time(interval, int_unit, argument="interval")
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value < 1:
        raise ValueError(
            f"`interval` must be a time in batches or epochs, at least 1, got {interval!r}. Use '100ba' or '1ep'."
        )
    return time


class FirstOfInterval:
    """Detector of the first microbatch of each interval, starting with the first batch of the run.

    Args:
        interval: The interval, in batches or epochs.
    """

    def __init__(self, interval: Time[Any]) -> None:
        self.interval = interval
        self._last: int | None = None

    def reset(self) -> None:
        """Prepare for a new run."""
        self._last = None

    def starts(self, state: State) -> bool:
        """Return True if an interval starts with the current batch, only in the first call for that batch."""
        count = state.timestamp.count(self.interval.unit)
        if count == self._last or count % self.interval.value:
            return False
        self._last = count
        return True
