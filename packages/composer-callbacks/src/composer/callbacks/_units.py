"""Units of time, and the form in which a callback declares what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

__all__ = ["Declared", "seconds_in"]

Declared: TypeAlias = Mapping[str, tuple[str, str]]
"""What a callback logs: `{key: (unit, meaning)}`; `<...>` in a key stands for what differs."""

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def seconds_in(time_unit: str) -> float:
    """The seconds in a unit of time.

    Args:
        time_unit: "seconds", "minutes", "hours" or "days".

    Raises:
        ValueError: It is none of these.
    """
    if time_unit not in _SECONDS:
        raise ValueError(
            f"`time_unit` must be one of 'seconds', 'minutes', 'hours' and 'days', got {time_unit!r}. Use 'hours'."
        )
    return _SECONDS[time_unit]
