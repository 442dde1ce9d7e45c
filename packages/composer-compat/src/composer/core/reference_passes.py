"""Passes that MosaicML's Composer has; here the declared placements order algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TypeVar

from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import ADDS_NORMS, PRUNES_BATCH, Algorithm, Event

T = TypeVar("T")


def sort_to_front(list_to_sort: Sequence[T], cls: type | tuple[type, ...]) -> list[T]:
    """Return the list with instances of `cls` first; otherwise the order is unchanged."""
    return sorted(list_to_sort, key=lambda item: not isinstance(item, cls))


def sort_to_back(list_to_sort: Sequence[T], cls: type | tuple[type, ...]) -> list[T]:
    """Return the list with instances of `cls` last; otherwise the order is unchanged."""
    return sorted(list_to_sort, key=lambda item: isinstance(item, cls))


def warn_if_multiple_loss_interpolation(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Warn (`NotIntendedUseWarning`) if several algorithms interpolate the loss. The order is unchanged.

    Args:
        algorithms: The algorithms about to act, with or without an attribute `interpolate_loss`.
        event: The current event.
    """
    interpolating = [a for a in algorithms if getattr(a, "interpolate_loss", False)]
    if len(interpolating) > 1:
        names = " and ".join(f"`{type(a).__name__}`" for a in interpolating)
        warnings.warn(
            f"{names} all interpolate the loss at {event.value!r}, so the result is not the loss of any of them. "
            f"Set `interpolate_loss=False` on all but one.",
            NotIntendedUseWarning,
            stacklevel=2,
        )
    return algorithms


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Move algorithms that prune the batch to the front. `order_by_placement` also does this."""
    return sorted(algorithms, key=lambda a: PRUNES_BATCH not in a.placement.provides)


def sort_low_precision_layernorm_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Move algorithms that must follow added norms to the end. `order_by_placement` also does this."""
    return sorted(algorithms, key=lambda a: ADDS_NORMS in a.placement.after)
