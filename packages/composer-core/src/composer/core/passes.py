"""Passes: functions that reorder the algorithms that act at an event.

The default passes follow the declared placements. Custom passes (`Trainer(algorithm_passes=...)`,
`Engine.register_pass`) get the matching algorithms in that order and return them in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from composer.core._registry import registered_names
from composer.core.algorithm import declared_events
from composer.core.ordering import Ordering, opener_of

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.event import Event

AlgorithmPass = Callable[[Sequence["Algorithm"], "Event"], Sequence["Algorithm"]]
"""A function of algorithms and an event that returns the algorithms in the order in which they act."""
PassInput = AlgorithmPass | tuple[AlgorithmPass, int] | list[AlgorithmPass | tuple[AlgorithmPass, int] | int] | None


def order_by_placement(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Sort the algorithms by their placements; where these declare nothing, the order is unchanged.

    Args:
        algorithms: The algorithms about to act.
        event: The current event.

    Raises:
        OrderingError: The declared orders contradict each other.
        ConflictError: One of the algorithms excludes another.
    """
    return [algorithms[i] for i in Ordering(algorithms).forward]


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the list at AFTER and END events (first in, last out), without breaking a declared order.

    Args:
        algorithms: The algorithms about to act.
        event: The current event.
    """
    if not event.is_after_event:
        return algorithms
    ordering, opener = Ordering(algorithms), opener_of(event)
    acted = tuple(i for i in ordering.forward if opener in (declared_events(algorithms[i]) or ()))
    return [algorithms[i] for i in ordering.backward(tuple(range(len(algorithms))), acted)]


def warn_on_discouraged(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Warn (`NotIntendedUseWarning`) about pairs that a placement discourages. The order is unchanged.

    Args:
        algorithms: The algorithms about to act.
        event: The current event.
    """
    Ordering(algorithms).warn_discouraged()
    return algorithms


def parse_passes(passes: Any) -> list[tuple[AlgorithmPass, int]]:
    """Return the `(pass, index)` pairs of any form that `algorithm_passes` accepts.

    Raises:
        ValueError: `passes` has an unsupported form.
    """
    if passes is None:
        return []
    if callable(passes) or _is_pair(passes):
        passes = [passes]
    if not isinstance(passes, Sequence) or isinstance(passes, str):
        raise ValueError(_PASSES.format(passes))
    parsed = []
    for item in passes:
        if callable(item):
            parsed.append((item, -1))
        elif _is_pair(item):
            parsed.append((item[0], item[1]))
        else:
            raise ValueError(_PASSES.format(item))
    return parsed


def _is_pair(value: Any) -> bool:
    is_sequence = isinstance(value, (tuple, list)) and len(value) == 2
    return is_sequence and callable(value[0]) and isinstance(value[1], int)


_PASSES = (
    "`algorithm_passes` must be a function `f(algorithms, event) -> algorithms`, a pair `(function, index)` or a list "
    "of these, got {!r}."
)


__getattr__ = registered_names(__name__)
