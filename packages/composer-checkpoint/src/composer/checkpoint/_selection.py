"""Which entries of a model's or optimizer's state are meant, and in which precision."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from composer.utils import STR_TO_DTYPE, ensure_tuple

__all__ = ["Keys", "Precision", "check_keys", "check_precision", "converted", "selected"]

Keys = str | Sequence[str]
"""Glob patterns of names, as of `fnmatch`."""

Precision = str | torch.dtype
"""`"fp32"`, `"fp16"`, `"bf16"`, or a floating data type of torch."""


def check_keys(include_keys: Keys | None, ignore_keys: Keys | None) -> None:
    """Refuse two selections at once.

    Raises:
        ValueError: Both are given.
    """
    if include_keys is not None and ignore_keys is not None:
        raise ValueError(
            f"`include_keys` and `ignore_keys` must not be given together, got {include_keys!r} and {ignore_keys!r}. "
            f"Use the one that is easier to write."
        )


def selected(names: Iterable[str], include_keys: Keys | None, ignore_keys: Keys | None) -> list[str]:
    """The names that are meant, in their order. Warns of a pattern that matches none.

    Args:
        names: All names.
        include_keys: Patterns of those that are meant; None: all.
        ignore_keys: Patterns of those that are not.

    Raises:
        ValueError: Both are given.
    """
    check_keys(include_keys, ignore_keys)
    everything = list(names)
    if include_keys is None and ignore_keys is None:
        return everything
    hits: set[str] = set()
    for pattern in ensure_tuple(ignore_keys if include_keys is None else include_keys):
        found = fnmatch.filter(everything, pattern)
        if not found:
            warnings.warn(f"The pattern {pattern!r} matches none of the names.", stacklevel=3)
        hits.update(found)
    return [name for name in everything if (name in hits) == (include_keys is not None)]


def check_precision(precision: Precision | None) -> torch.dtype | None:
    """The data type that is meant; None: each tensor keeps its own.

    Raises:
        ValueError: It is no floating type.
    """
    found = STR_TO_DTYPE.get(precision) if isinstance(precision, str) else precision
    if precision is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"`precision` must be one of {', '.join(map(repr, STR_TO_DTYPE))}, a floating data type of torch, or None "
            f"(as it is), got {precision!r}."
        )
    return found


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating tensor in another precision; anything else is returned as it is."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)
