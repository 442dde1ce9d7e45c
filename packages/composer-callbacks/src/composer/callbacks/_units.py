"""Units of time."""

from __future__ import annotations

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def seconds_in(time_unit: str) -> float:
    """Return the number of seconds in "seconds", "minutes", "hours" or "days".

    Raises:
        ValueError: The unit is unknown.
    """
    if time_unit not in _SECONDS:
        raise ValueError(
            f"`time_unit` must be one of 'seconds', 'minutes', 'hours' and 'days', got {time_unit!r}. Use 'hours'."
        )
    return _SECONDS[time_unit]
