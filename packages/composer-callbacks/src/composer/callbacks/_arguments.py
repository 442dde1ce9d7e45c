"""Checks of arguments."""

from __future__ import annotations

__all__ = ["is_count"]


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number and not below `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
