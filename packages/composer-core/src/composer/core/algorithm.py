"""The base class of training methods."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

from composer.core.effects import INTERPOLATES_LOSS, Placement
from composer.core.event import Event
from composer.core.serializable import Serializable
from composer.utils.numbers import plain_number

if TYPE_CHECKING:
    from composer.core.state import State
    from composer.loggers.logger import Logger

__all__ = ["Algorithm"]


class Algorithm(Serializable, ABC):
    """A training method: at certain events it changes the state of the run.

    A subclass implements `apply` and says when it acts: by `events`, by `match`, or by both.

    Attributes:
        events: The events at which the algorithm may act; the engine asks it nowhere else. None: it is asked, through
            `match`, at every event.
        placement: Where it stands among other algorithms. A class attribute, or a property if it depends on arguments.

    Example:
        >>> class Doubled(Algorithm):
        ...     events = frozenset({Event.AFTER_LOSS})
        ...
        ...     def apply(self, event, state, logger):
        ...         state.loss = 2 * state.loss
    """

    events: frozenset[Event] | None = None
    placement: Placement = Placement()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def find_unused_parameters(self) -> bool:
        """Whether some parameters may get no gradient, which `DistributedDataParallel` must know."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """Whether the backward pass must itself be differentiable (`create_graph=True`)."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Whether a checkpoint can only be loaded after this algorithm has been applied (it renames parameters)."""
        return False

    def match(self, event: Event, state: State) -> bool:
        """Whether to act now. Without a `match` of its own, an algorithm acts at each of its `events`.

        Args:
            event: The current event.
            state: The state of the run.
        """
        return isinstance(self.events, (set, frozenset)) and event in self.events

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Act: change the state in place.

        Args:
            event: The current event.
            state: The state of the run.
            logger: Takes metrics of the algorithm's own.

        Returns:
            An optional exit code, kept in the event's `Trace`.
        """

    def __repr__(self) -> str:
        """A constructor call, `MixUp(alpha=0.2)`, where every argument is kept in an attribute of its name."""
        names = [name for name, p in inspect.signature(type(self)).parameters.items() if p.kind not in _VARIADIC]
        if not all(hasattr(self, name) for name in names):
            return object.__repr__(self)
        arguments = ",".join(f"{name}={_argument(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({arguments})"

    def state_dict(self) -> dict[str, Any]:
        """The representation, from which a required algorithm is rebuilt on load."""
        return {"repr": repr(self)}


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _argument(value: Any) -> str:
    return str(value) if isinstance(value, Enum) else repr(plain_number(value))


def declared_events(algorithm: Algorithm) -> frozenset[Event] | None:
    """The events an algorithm restricts itself to; None if it must be asked at every event.

    Code that knows nothing of this attribute may use its name for something else, and a subclass may widen `match`
    without repeating it; both are asked.
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
    """The placement of an algorithm; one that only says `interpolate_loss = True` provides and discourages that."""
    placement: Any = algorithm.placement
    if not isinstance(placement, Placement):
        return Placement()
    if placement == Placement() and getattr(algorithm, "interpolate_loss", False) is True:
        return Placement(provides={INTERPOLATES_LOSS}, discourages={INTERPOLATES_LOSS})
    return placement


def always_matches(algorithm: Algorithm) -> bool:
    """Whether the algorithm acts at each of its events, so that it need not be asked.

    Raises:
        TypeError: It never says when it acts.
    """
    if getattr(type(algorithm), "match", None) is not Algorithm.match or "match" in vars(algorithm):
        return False
    if declared_events(algorithm) is None:
        raise TypeError(
            f"`{type(algorithm).__name__}` must say when it acts, but has neither `events` nor a `match` of its own. "
            f"Set for example `events = frozenset({{Event.BATCH_END}})`."
        )
    return True
