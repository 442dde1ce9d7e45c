"""The base class of training algorithms."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

from composer.core.effects import INTERPOLATES_LOSS, Placement
from composer.core.event import Event
from composer.core.serializable import Serializable
from composer.utils.numbers import plain_number

if TYPE_CHECKING:
    from composer.core.logging import Logger
    from composer.core.state import State


class Algorithm(Serializable, ABC):
    """A training method that changes the state of the run at certain events.

    A subclass implements `apply` and declares when it acts: with `events`, with `match`, or with both.

    Attributes:
        events: The events at which the algorithm may act. None means every event: the engine then calls `match` at
            each.
        placement: The position among other algorithms. A class attribute, or a property if it depends on arguments.

    Example:
        >>> class Doubled(Algorithm):
        ...     events = frozenset({Event.AFTER_LOSS})
        ...
        ...     def apply(self, event, state, logger):
        ...         state.loss = 2 * state.loss
    """

    events: frozenset[Event] | None = None
    placement: Placement = Placement()
    _initialized_in: tuple[int, int] | None = None  # the ids of this object and of the state of its last run

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def find_unused_parameters(self) -> bool:
        """True if some parameters may get no gradient; passed to `DistributedDataParallel`."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """True if the backward pass must be differentiable itself (`create_graph=True`)."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Return True if checkpoints can only be loaded after this algorithm is applied (it renames parameters)."""
        return False

    def match(self, event: Event, state: State) -> bool:
        """Return True if the algorithm acts now; by default at each of its `events`.

        Args:
            event: The current event.
            state: The state of the run.
        """
        return isinstance(self.events, (set, frozenset)) and event in self.events

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Change the state in place.

        Args:
            event: The current event.
            state: The state of the run.
            logger: The logger of the run.

        Returns:
            An optional exit code, stored in the `Trace` of the event.
        """

    def explain(self) -> str:
        """Return what the algorithm has decided in this run, for `engine.explain()`; "" if there is nothing to say."""
        return ""

    def __repr__(self) -> str:
        """Return the constructor call, such as `MixUp(alpha=0.2)`; each argument is read from its attribute."""
        names = [name for name, p in inspect.signature(type(self)).parameters.items() if p.kind not in _VARIADIC]
        if not all(hasattr(self, name) for name in names):
            return object.__repr__(self)
        arguments = ",".join(f"{name}={_argument(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({arguments})"

    def state_dict(self) -> dict[str, Any]:
        """Return the `repr`, from which a required algorithm is rebuilt when a checkpoint is loaded."""
        return {"repr": repr(self)}


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _argument(value: Any) -> str:
    if isinstance(value, FunctionType):
        return value.__qualname__  # its `repr` has an address, which differs from run to run
    return str(value) if isinstance(value, Enum) else repr(plain_number(value))


def declared_events(algorithm: Algorithm) -> frozenset[Event] | None:
    """Return the events that an algorithm declares; None if `match` must be called at every event.

    Also None if `events` holds something else, as in code written for other libraries, and if a subclass overrides
    `match` without declaring `events` again.
    """
    events = algorithm.events
    if not isinstance(events, (set, frozenset)) or not all(isinstance(event, Event) for event in events):
        return None
    kinds = type(algorithm).__mro__
    matching = next((i for i, kind in enumerate(kinds) if "match" in vars(kind)), len(kinds))
    declaring = next((i for i, kind in enumerate(kinds) if "events" in vars(kind)), len(kinds))
    if matching < declaring and "events" not in vars(algorithm):
        return None
    return frozenset(events)


def declared_placement(algorithm: Algorithm) -> Placement:
    """Return the placement of an algorithm; one that only sets `interpolate_loss = True` gets a default placement."""
    placement: Any = algorithm.placement
    if not isinstance(placement, Placement):
        return Placement()
    if placement == Placement() and getattr(algorithm, "interpolate_loss", False) is True:
        return Placement(provides={INTERPOLATES_LOSS}, discourages={INTERPOLATES_LOSS})
    return placement


def always_matches(algorithm: Algorithm) -> bool:
    """Return True if the algorithm acts at each of its events, so that `match` need not be called.

    Raises:
        TypeError: The algorithm has neither `events` nor `match`.
    """
    if getattr(type(algorithm), "match", None) is not Algorithm.match or "match" in vars(algorithm):
        return False
    if declared_events(algorithm) is None:
        raise TypeError(
            f"`{type(algorithm).__name__}` must declare when it acts, but defines neither `events` nor `match`. "
            f"Set for example `events = frozenset({{Event.BATCH_END}})`."
        )
    return True
