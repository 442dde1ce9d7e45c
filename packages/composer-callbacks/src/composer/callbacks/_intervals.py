"""Which batches a callback looks at, when it does so before they are trained."""

from __future__ import annotations

from typing import Any, SupportsIndex

from composer.core import State, Time, TimeUnit, ensure_time

__all__ = ["FirstOfInterval", "in_batches_or_epochs"]


def in_batches_or_epochs(interval: SupportsIndex | str | Time[Any], int_unit: TimeUnit = TimeUnit.BATCH) -> Time[Any]:
    """An interval as a `Time`.

    Args:
        interval: A time in batches or epochs.
        int_unit: The unit of a plain number.

    Raises:
        ValueError: It is in another unit, or not positive.
    """
    time = ensure_time(interval, int_unit, argument="interval")
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value < 1:
        raise ValueError(
            f"`interval` must be a time in batches or epochs, at least 1, got {interval!r}. Use '100ba' or '1ep'."
        )
    return time


class FirstOfInterval:
    """Says at which batch an interval begins: at the first batch of the run, and after each interval, once.

    Args:
        interval: In batches or epochs.
    """

    def __init__(self, interval: Time[Any]) -> None:
        self.interval = interval
        self._last: int | None = None

    def reset(self) -> None:
        """Forget the last run."""
        self._last = None

    def begins(self, state: State) -> bool:
        """Whether an interval begins with the batch that is trained now. True once: at its first microbatch."""
        count = state.timestamp._count(self.interval.unit)
        if count == self._last or count % self.interval.value:
            return False
        self._last = count
        return True
