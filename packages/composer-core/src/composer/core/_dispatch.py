"""The compiled plan of an engine: for each event, who acts there and in which order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from composer.core._ordering import Ordering, opener_of
from composer.core.algorithm import always_matches, declared_events
from composer.core.event import Event

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.logging import Logger
    from composer.core.passes import AlgorithmPass
    from composer.core.state import State

__all__ = ["AlgorithmPlan", "Trace", "Traces"]

Hook = Callable[["State", "Logger"], Any]


@dataclass
class Trace:
    """What one algorithm did at one event.

    Attributes:
        name: The class of the algorithm.
        event: The event.
        exit_code: What `apply` returned.
        order: The position among the algorithms that ran, from 0.
        run: Whether it ran.
    """

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Traces = dict[str, Trace]


class _Applied(Protocol):
    """An algorithm, or what stands for it."""

    def apply(self, event: Event, state: State, logger: Logger) -> int | None: ...


class AlgorithmPlan:
    """Runs the algorithms of one event in their order.

    Args:
        event: The event.
        ordering: The order of all the run's algorithms.
        passes: Passes that replace the order (`replace`) or follow it.
        replace: Whether `passes` is the whole list of passes.
        acted: For each event, the indices of the algorithms that acted there last, in order; shared by all plans.
        applied: What is applied instead of the run's algorithms, one each; None: they themselves.
    """

    def __init__(
        self,
        event: Event,
        ordering: Ordering,
        passes: Sequence[AlgorithmPass],
        replace: bool,
        acted: dict[Event, tuple[int, ...]],
        applied: Sequence[_Applied] | None = None,
    ) -> None:
        self.event, self.ordering = event, ordering
        self._passes, self._replace, self._acted = tuple(passes), replace, acted
        self._opener = opener_of(event)
        algorithms = ordering.algorithms
        self._applied: Sequence[_Applied] = algorithms if applied is None else applied
        self.candidates = tuple(i for i in ordering.forward if _may_act(algorithms[i], event))
        self._ascending = tuple(sorted(self.candidates))
        # Who acted at an opening event matters only where a declared order and an undoing one can meet.
        self._remember = ordering.declared and event.is_before_event
        self._reorder = ordering.declared and event.is_after_event
        self._always = all(always_matches(algorithms[i]) for i in self.candidates)
        self._keys = _trace_keys(algorithms, self.candidates, event)
        self._names = {i: type(algorithms[i]).__name__ for i in self.candidates}
        self._index = {id(algorithm): i for i, algorithm in enumerate(algorithms)}

    def expected(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The order if every candidate acts, and those taken to have acted at the opening event (None: no reversal)."""
        if not self.event.is_after_event:
            return self.candidates, None
        algorithms, opener = self.ordering.algorithms, self._opener
        acted = tuple(
            i
            for i in self.ordering.forward
            if i in self.candidates and opener in (declared_events(algorithms[i]) or ())
        )
        return self.ordering.backward(self._ascending, acted), acted

    def run(self, state: State, logger: Logger) -> Traces:
        """Apply every matching algorithm; return their traces by `"{algorithm}/{event}"`."""
        event, algorithms = self.event, self.ordering.algorithms
        if self._always:
            order, ascending = self.candidates, self._ascending
        else:
            order = tuple(i for i in self.candidates if algorithms[i].match(event, state))
            if not order and not self._passes:
                if self._remember:
                    self._acted[event] = ()
                return OrderedDict()
            ascending = tuple(sorted(order))
        if event.is_after_event and not self._replace:
            acted = self._acted.get(self._opener, ()) if self._reorder and self._opener else ()
            order = self.ordering.backward(ascending, acted)
        if self._passes:
            return self._apply_passed(order if not self._replace else ascending, state, logger)
        if self._remember:
            self._acted[event] = order
        return self._apply(order, state, logger)

    def _apply_passed(self, order: Sequence[int], state: State, logger: Logger) -> Traces:
        """Apply what the passes return, which may hold algorithms that do not act at the event or are not the run's."""
        event = self.event
        algorithms: Sequence[Algorithm] = [self.ordering.algorithms[i] for i in order]
        for algorithm_pass in self._passes:
            algorithms = algorithm_pass(algorithms, event)
            if not isinstance(algorithms, Sequence):
                raise TypeError(
                    f"A pass of `algorithm_passes` must return the list of algorithms, got {algorithms!r} from "
                    f"{algorithm_pass!r}. Return its first argument, reordered."
                )
        indices = [self._index.get(id(algorithm)) for algorithm in algorithms]
        if self._remember:
            self._acted[event] = tuple(i for i in indices if i is not None)
        if all(i in self._keys for i in indices):
            return self._apply([i for i in indices if i is not None], state, logger)
        traces: Traces = OrderedDict()
        for position, (i, algorithm) in enumerate(zip(indices, algorithms, strict=True)):
            applied = algorithm if i is None else self._applied[i]
            exit_code = applied.apply(event, state, logger)
            trace = Trace(type(algorithm).__name__, event, exit_code, position, True)
            traces[_free_key(str(algorithm), event, traces)] = trace
        if logger.destinations:
            logger.log_traces({f"algorithm_traces/{trace.name}/{event}": 1 for trace in traces.values()})
        return traces

    def _apply(self, order: Sequence[int], state: State, logger: Logger) -> Traces:
        event, applied = self.event, self._applied
        traces: Traces = OrderedDict()
        for position, i in enumerate(order):
            exit_code = applied[i].apply(event, state, logger)
            traces[self._keys[i]] = Trace(self._names[i], event, exit_code, position, True)
        if logger.destinations:
            logger.log_traces({f"algorithm_traces/{self._names[i]}/{event}": 1 for i in order})
        return traces


def _trace_keys(algorithms: Sequence[Algorithm], indices: Sequence[int], event: Event) -> dict[int, str]:
    """`"{algorithm}/{event}"`; of algorithms that print alike, the later ones are numbered."""
    keys: dict[int, str] = {}
    for i in indices:
        keys[i] = _free_key(str(algorithms[i]), event, keys.values())
    return keys


def _free_key(name: str, event: Event, taken: Container[str]) -> str:
    count = 1
    while (key := f"{name}/{event}" if count == 1 else f"{name}#{count}/{event}") in taken:
        count += 1
    return key


def _may_act(algorithm: Algorithm, event: Event) -> bool:
    events = declared_events(algorithm)
    return events is None or event in events
