"""Utilities for single values and collections."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from composer.utils._registered import find_registered


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


def map_items(mapping: dict[Any, Any], map_fn: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Apply a function to each value of a dict; return a dict of the same class, such as `Counter`.

    Args:
        mapping: The dict; not modified.
        map_fn: A function of key and value that returns the new value.

    Example:
        >>> from collections import Counter
        >>> map_items(Counter("aab"), lambda key, count: 10 * count)
        Counter({'a': 20, 'b': 10})
    """
    if type(mapping) is dict:
        return {key: map_fn(key, value) for key, value in mapping.items()}
    copied = copy.copy(mapping)  # the constructor may take other arguments than pairs
    for key, value in mapping.items():
        copied[key] = map_fn(key, value)
    return copied


def __getattr__(name: str) -> Any:  # such as `map_collection`
    return find_registered(__name__, name)
