"""Utilities for single values and collections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer.core._registry import registered_names


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a single value or a collection as a tuple.

    Args:
        x: None, a sequence, a dict (its values are used) or a single value. Strings and bytes are single values.

    Returns:
        `()` for None, the elements of a sequence, the values of a dict, or `(x,)`.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2]), ensure_tuple({"a": 1})
        ((), ('ab',), (1, 2), (1,))
    """
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray)):
        return (x,)
    if isinstance(x, Sequence):
        return tuple(x)
    if isinstance(x, dict):
        return tuple(x.values())
    return (x,)


def length_of(sized: Any) -> int | None:
    """Return the length of a loader or dataset; None if it has none.

    Args:
        sized: The loader or dataset. The length of a torch loader is that of its dataset, which may have none.
    """
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


__getattr__ = registered_names(__name__, "composer.utils")


def check_distinct(argument: str, items: Sequence[Any]) -> None:
    """Check that no object is given twice: it would run twice. Two objects of one class are fine.

    Raises:
        ValueError: An object is given twice.
    """
    if len({id(item) for item in items}) == len(items):
        return
    twice = next(item for index, item in enumerate(items) if any(item is other for other in items[:index]))
    raise ValueError(
        f"`{argument}` must contain every object once, got the same `{type(twice).__name__}` object twice: it would "
        f"run twice at every event. Remove one, or create a second object."
    )
