"""The type in which callbacks declare what they log, and units of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Declared: TypeAlias = Mapping[str, tuple[str, str]]
"""The metrics of a callback: `{key: (unit, meaning)}`; `<...>` in a key is a placeholder."""

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
