"""When the averages start and are updated, and how much of them each update keeps."""

from __future__ import annotations

from typing import Any

from composer.core import State, Time, TimeUnit
from composer.utils import check_finite

__all__ = ["check_smoothing", "has_passed", "is_due", "parse"]


def parse(half_life: Any, smoothing: Any, ema_start: Any, update_interval: Any) -> tuple[float, Time[Any], Time[Any]]:
    """Check and combine the arguments of `EMA`, whose docstring says what they mean and what is raised.

    Returns:
        The smoothing, the time between updates, and the start.
    """
    if (half_life is None) == (smoothing is None):
        raise ValueError(
            f"Exactly one of `half_life` and `smoothing` must be given, got {half_life!r} and {smoothing!r}. "
            f"Pass `half_life=None` with a `smoothing`."
        )
    if update_interval is not None and not isinstance(update_interval, (str, Time)):
        raise ValueError(
            f"`update_interval` must be a time string, a `Time` or None, got {update_interval!r}. Use '1ba'."
        )
    decay = None if half_life is None else _parse("half_life", half_life, least=1)
    unit = TimeUnit.BATCH if decay is None else decay.unit
    interval = Time(1, unit) if update_interval is None else _parse("update_interval", update_interval, least=1)
    if interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        raise ValueError(
            f"`half_life` and `update_interval` must be in 'ba' or 'ep', got '{interval}'. The average is updated "
            f"after batches or after epochs."
        )
    if decay is not None:
        if decay.unit is not interval.unit:
            raise ValueError(
                f"`half_life` and `update_interval` must have the same unit, got '{decay}' and '{interval}'. Give both "
                f"in 'ba' or both in 'ep'."
            )
        smoothing = 2 ** (-interval.value / decay.value) if decay.value else 0.0
    check_smoothing(smoothing)
    return float(smoothing), interval, _parse("ema_start", ema_start, least=0)


def check_smoothing(smoothing: float) -> None:
    """Raise ValueError unless `smoothing` is in [0, 1]."""
    check_finite(smoothing=smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"`smoothing` must be in [0, 1], got {smoothing!r}. It is the weight that an average keeps.")


def has_passed(time: Time[Any], state: State) -> bool:
    """Whether the run has come so far."""
    if time.unit is TimeUnit.DURATION:
        elapsed = state.get_elapsed_duration()
        return elapsed is not None and elapsed >= time
    return state.timestamp >= time


def is_due(interval: Time[Any], state: State) -> bool:
    """Whether a whole number of intervals has passed."""
    count, every = state.timestamp.get(interval.unit).value, int(interval)
    return count % every == 0


def _parse(argument: str, given: Any, least: int) -> Time[Any]:
    if not isinstance(given, (str, Time)):
        raise TypeError(f"`{argument}` must be a time string or a `Time`, got {given!r}. Write for example '100ba'.")
    time = Time.from_input(given)
    if time.value < least:
        raise ValueError(f"`{argument}` must be at least {least}, got {str(given)!r}.")
    return time
