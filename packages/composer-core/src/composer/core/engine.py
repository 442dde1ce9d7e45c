"""The engine: at each event of a run it calls the algorithms and callbacks that act there."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from composer.core._observed import ObservedList
from composer.core._registry import html_of, load
from composer.core.algorithm import always_matches, declared_events
from composer.core.callback import Callback, dispatches_by_name, overridden_hooks
from composer.core.event import Event
from composer.core.logging import Logger, LoggerDestination, log_failure_count, record_failure
from composer.core.ordering import Ordering, opener_of
from composer.core.passes import (
    AlgorithmPass,
    PassInput,
    order_by_placement,
    parse_passes,
    set_filo_order,
    warn_on_discouraged,
)
from composer.utils.iter_helpers import ensure_tuple

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.state import State

log = logging.getLogger(__name__)
T = TypeVar("T")

_DEFAULT_PASSES: tuple[AlgorithmPass, ...] = (order_by_placement, set_filo_order, warn_on_discouraged)
_EVENTS: dict[str, Event] = {event.value: event for event in Event}  # some loops pass strings at every step
_WITHOUT_DATALOADER = frozenset(
    {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END}
)
_WITHOUT_DURATION = frozenset(
    event
    for event in Event
    if event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD) or event.is_eval or event.is_predict
)


@dataclass
class Trace:
    """A record of one algorithm that ran at one event.

    Attributes:
        name: The class name of the algorithm.
        event: The event.
        exit_code: The return value of `apply`.
        order: The position among the algorithms that ran, from 0.
        run: True if it ran.
    """

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Traces = dict[str, Trace]
"""The algorithms that ran at an event, by `"{algorithm}/{event}"`."""


@dataclass(frozen=True)
class PlanRow:
    """One row of a plan: an algorithm or callback that acts at an event.

    Attributes:
        event: The event.
        order: The position at the event, from 1.
        kind: `"algorithm"`, `"callback"` or `"logger"`.
        name: The class name.
        reason: The reason for the position.
    """

    event: Event
    order: int
    kind: str
    name: str
    reason: str


class Plan(Sequence[PlanRow]):
    """The plan of an engine, as returned by `engine.explain()`. Printed, it is a table, followed by the notes.

    Args:
        rows: The rows, sorted by event and then by position.
        notes: What algorithms have decided, by class name; see `Algorithm.explain`.
    """

    def __init__(self, rows: Sequence[PlanRow], notes: Mapping[str, str] | None = None) -> None:
        self.rows, self.notes = tuple(rows), dict(notes or {})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def at(self, event: Event | str) -> list[PlanRow]:
        """Return the rows of one event, in order."""
        event = Event(event)
        return [row for row in self.rows if row.event is event]

    def __str__(self) -> str:
        if not self.rows:
            return "No algorithm or callback acts at any event."
        header = ("event", "order", "kind", "name", "why here")
        table = [header]
        previous = None
        for row in self.rows:
            event = "" if row.event is previous else row.event.value
            table.append((event, str(row.order), row.kind, row.name, row.reason))
            previous = row.event
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [line for name, note in self.notes.items() for line in ("", f"{name}:", *note.splitlines())]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return html_of("html_of_plan", self)


class Dispatch:
    """The compiled events of a run: `dispatch.batch_end()` runs BATCH_END; None where nothing acts.

    A loop that checks first does not even call a function for an event at which nothing acts::

        dispatch = engine.dispatch
        if dispatch.batch_end:
            dispatch.batch_end()
    """

    __slots__ = tuple(event.value for event in Event)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[], Traces] | None: ...
        def __setattr__(self, name: str, run: Callable[[], Traces] | None) -> None: ...


class Engine:
    """The engine of a run: at each event it calls the algorithms and callbacks that act there.

    Dispatch is compiled: `dispatch` holds, for each event, the algorithms and callbacks in their order, so an event
    without any costs one look-up. It is compiled again, in place, when `state.algorithms` or `state.callbacks` change.

    At INIT the order is loggers, callbacks, algorithms; at all other events algorithms, callbacks, loggers. Algorithms
    act in the order in which the user listed them, unless their placements say otherwise. At AFTER and END events the
    order is reversed: first in, last out.

    Args:
        state: The state of the run, with its algorithms and callbacks.
        logger: The logger that algorithms and callbacks log with; None: a logger with the destinations among
            `state.callbacks`.
        algorithm_passes: Custom passes: a function, `(function, index)`, or a list of these. They run after the default
            passes, or at position `index` in `engine.algorithm_passes`.
        algorithms: Algorithms to add to `state.algorithms`.

    Raises:
        ConflictError: One algorithm excludes another.
        OrderingError: The declared orders of some algorithms contradict each other.
        ValueError: `algorithm_passes` has an unsupported form.

    Example:
        In a custom training loop::

            engine = Engine(state, algorithms=[MixUp()])
            for batch in loader:
                state.batch = batch
                engine.run_event("before_forward")
                state.outputs = state.model(state.batch)
    """

    def __init__(
        self,
        state: State,
        logger: Logger | None = None,
        algorithm_passes: PassInput = None,
        *,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
    ) -> None:
        self.dispatch = Dispatch()
        self._markers: Any = None
        self.state = state
        if logger is None:
            logger = Logger(state, [c for c in state.callbacks if isinstance(c, LoggerDestination)])
        self.logger = logger
        if algorithms is not None:
            state.algorithms.extend(ensure_tuple(algorithms))
        passes: ObservedList[AlgorithmPass] = ObservedList(_DEFAULT_PASSES)
        self.algorithm_passes = passes
        for algorithm_pass, index in parse_passes(algorithm_passes):
            self.register_pass(algorithm_pass, index)
        changed = _without_reference(self._expire)
        passes._on_change = changed
        state._observers.append(changed)
        # Runs once: at `close`, when the engine is garbage-collected, or at exit.
        self._close = weakref.finalize(self, _close, state, self.logger)
        self._ordering = Ordering(())
        self._compile()
        self.logger._explain = _without_reference(self.explain)

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass.

        Args:
            algorithm_pass: A function `f(algorithms, event) -> algorithms`.
            index: Where to insert it into `algorithm_passes`; -1 appends.
        """
        if index == -1:
            index = len(self.algorithm_passes)
        self.algorithm_passes.insert(index, algorithm_pass)

    def run_event(self, event: Event | str) -> Traces:
        """Run the algorithms and callbacks that act at an event.

        Args:
            event: An `Event`, its name or its value.

        Returns:
            A `Trace` for each algorithm that ran, keyed by `"{algorithm}/{event}"`.

        Raises:
            ValueError: The event is unknown.
            RuntimeError: The engine is closed, or (at INIT) a callback is still open in another run.
            AssertionError: The event needs a dataloader or `max_duration`, and the state has none.
        """
        try:
            run = getattr(self.dispatch, event._value_)  # type: ignore[union-attr]
        except AttributeError:  # a string
            event = _EVENTS.get(event) or Event(event)  # type: ignore[arg-type]
            run = getattr(self.dispatch, event.value)
        return {} if run is None else run()

    def run_marker_only_event(self, event: Event | str) -> None:
        """Report an event to the profiler without running it, e.g. when the loader has no more batches.

        Args:
            event: An `Event`, its name or its value.

        Raises:
            ValueError: The event is unknown.
        """
        event = Event(event)
        if self.state.profiler is not None:
            self._event_markers().marker_of(event)()

    def explain(self) -> Plan:
        """Return the compiled plan: for each event the algorithms and callbacks, their order and the reasons for it.

        What algorithms have decided, such as which parameters they train, is in its `notes`.

        An algorithm that declares no `events` is listed at every event, because its `match` is called there.
        """
        rows: list[PlanRow] = []
        for event in Event:
            actors: list[tuple[str, str, str]] = []
            plan = self._algorithm_plan(event, {})
            order, acted = plan.expected()
            for i in order:
                algorithm = plan.ordering.algorithms[i]
                reason = plan.ordering.why(i, order, acted)
                note = "" if algorithm.events is not None else " (if `match` returns True)"
                actors.append(("algorithm", type(algorithm).__name__, reason + note))
            if any(each not in _DEFAULT_PASSES for each in self.algorithm_passes):
                actors = [(kind, name, f"{why}; then reordered by custom passes") for kind, name, why in actors]
            callbacks = [
                ("logger" if isinstance(c, LoggerDestination) else "callback", type(c).__name__, "as listed")
                for c in self._callbacks_at(event)
            ]
            actors = callbacks + actors if event is Event.INIT else actors + callbacks
            rows.extend(PlanRow(event, n, *row) for n, row in enumerate(actors, start=1))
        notes = {type(algorithm).__name__: algorithm.explain() for algorithm in self.state.algorithms}
        names = [
            f"{part}: {self.state._found_keys[key]!r}"
            for key, part in enumerate(("inputs", "targets"))
            if key in self.state._found_keys
        ]
        notes["batch"] = ", ".join(names)
        return Plan(rows, {name: note for name, note in notes.items() if note})

    def close(self) -> None:
        """Close all callbacks and loggers. Safe to call twice; also called when the engine is garbage-collected."""
        self._close()
        self._expire()

    # ---- compilation ----

    def _expire(self) -> None:
        """Compile the events again when the next one runs."""
        for event in Event:
            setattr(self.dispatch, event.value, partial(_compile_and_run, weakref.ref(self), event))

    def _compile(self) -> None:
        if not self._close.alive:
            raise RuntimeError("The engine is closed and cannot run events. Create a new `Engine` or `Trainer`.")
        before = self._ordering.algorithms
        self._ordering = Ordering(self.state.algorithms)
        if self._ordering.algorithms != before:
            self._ordering.warn_discouraged()
        acted: dict[Event, tuple[int, ...]] = {}
        runs = [self._plan_event(event, acted) for event in Event]
        for event, run in zip(Event, runs, strict=True):
            setattr(self.dispatch, event.value, run)

    def _event_markers(self) -> Any:
        profiler = self.state.profiler
        if self._markers is None or self._markers.profiler is not profiler:
            self._markers = load("composer.core.profiling", "EventMarkers")(profiler)  # needs composer-profiler
        return self._markers

    def _algorithm_plan(self, event: Event, acted: dict[Event, tuple[int, ...]], markers: Any = None) -> AlgorithmPlan:
        passes = tuple(self.algorithm_passes)
        appended = passes[: len(_DEFAULT_PASSES)] == _DEFAULT_PASSES
        chosen = passes[len(_DEFAULT_PASSES) :] if appended else passes
        applied = None if markers is None else markers.algorithms(self._ordering.algorithms, event)
        return AlgorithmPlan(event, self._ordering, chosen, not appended, acted, self.state, self.logger, applied)

    def _callbacks_at(self, event: Event) -> list[Callback]:
        """Return the callbacks that override the method of an event, in the order in which they are called."""
        callbacks = [c for c in self.state.callbacks if event.value in overridden_hooks(c)]
        loggers_first = event is Event.INIT
        return sorted(callbacks, key=lambda c: isinstance(c, LoggerDestination) != loggers_first)

    def _plan_event(self, event: Event, acted: dict[Event, tuple[int, ...]]) -> Callable[[], Traces] | None:
        state, logger = self.state, self.logger
        problem = _missing(event, state)
        if problem is not None:

            def fail() -> Traces:
                raise AssertionError(f"The event {event.value!r} cannot run: {problem}")

            return fail
        markers = None if state.profiler is None else self._event_markers()
        plan = self._algorithm_plan(event, acted, markers)
        algorithms = plan if plan.candidates or plan.passes else None
        callbacks = self._callbacks_at(event)
        hooks: list[Callable[[State, Logger], Any]] = [_safe_hook(c, event) for c in callbacks]
        if markers is not None:
            hooks = [markers.hook(c, h, event) for c, h in zip(callbacks, hooks, strict=True)]
        if "ENGINE_DEBUG" in os.environ:
            hooks = [_logged(c, h, event) for c, h in zip(callbacks, hooks, strict=True)]
            hooks.insert(0, lambda state, logger: log.debug("%s: Running event", _prefix(event, state)))
        if event is Event.INIT:
            return lambda: _run_init(algorithms, hooks, state, logger)
        if event in (Event.FIT_START, Event.EVAL_STANDALONE_START) and state.algorithms:
            hooks.insert(0, _check_owned)
        run = None if algorithms is None else algorithms.compile()
        if hooks:
            run = _then(hooks, run, state, logger)
        return run if markers is None else markers.around(event, run)


# ---- dispatch


_Apply = Callable[[Event, "State", Logger], int | None]


class _Applied(Protocol):
    """An algorithm, or a wrapper around one."""

    def apply(self, event: Event, state: State, logger: Logger) -> int | None: ...


class _Calls(NamedTuple):
    """The calls of algorithms in an order.

    Attributes:
        order: The indices of the algorithms.
        run: Calls them.
    """

    order: tuple[int, ...]
    run: Callable[[], Traces]


class AlgorithmPlan:
    """The plan for one event, which runs its algorithms in order.

    Args:
        event: The event.
        ordering: The order of all the run's algorithms.
        passes: Custom passes that run after the default ones, or all passes (`replace`).
        replace: True if `passes` replaces the default passes.
        acted: The indices of the algorithms that acted last at each event, in order; shared by all plans.
        state: The state of the run.
        logger: Passed to the algorithms.
        applied: Wrappers to apply instead of the algorithms, one for each; None for the algorithms themselves.
    """

    def __init__(
        self,
        event: Event,
        ordering: Ordering,
        passes: Sequence[AlgorithmPass],
        replace: bool,
        acted: dict[Event, tuple[int, ...]],
        state: State,
        logger: Logger,
        applied: Sequence[_Applied] | None = None,
    ) -> None:
        self.event, self.ordering, self._state, self._logger = event, ordering, state, logger
        self.passes, self._replace, self._acted = tuple(passes), replace, acted
        self._opener = opener_of(event)
        algorithms = ordering.algorithms
        self._applied: Sequence[_Applied] = algorithms if applied is None else applied
        self.candidates = tuple(
            i for i in ordering.forward if (events := declared_events(algorithms[i])) is None or event in events
        )
        # Which algorithms acted at the first event of a pair matters only if there are declared orders.
        self._remember = ordering.declared and event.is_before_event
        self._reorder = ordering.declared and event.is_after_event
        self._matches = [(i, algorithms[i].match) for i in self.candidates]
        self._calls: dict[tuple[int, ...], _Calls] = {}
        # The keys are the algorithms that match, and those that acted at the first event of the pair.
        self._matched: dict[tuple[tuple[int, ...], tuple[int, ...]], _Calls] = {}
        self._keys: dict[int, str] = {}
        for i in self.candidates:
            self._keys[i] = _free_key(str(algorithms[i]), event, self._keys.values())
        self._names = {i: type(algorithms[i]).__name__ for i in self.candidates}
        self._index = {id(algorithm): i for i, algorithm in enumerate(algorithms)}

    def expected(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the order if every candidate acts, and the assumed actors at the first event (None: no reversal)."""
        if not self.event.is_after_event:
            return self.candidates, None
        algorithms, opener = self.ordering.algorithms, self._opener
        acted = tuple(
            i
            for i in self.ordering.forward
            if i in self.candidates and opener in (declared_events(algorithms[i]) or ())
        )
        return self.ordering.backward(tuple(sorted(self.candidates)), acted), acted

    def compile(self) -> Callable[[], Traces]:
        """Return a function that applies every matching algorithm and returns the traces by `"{algorithm}/{event}"`."""
        if not all(always_matches(self.ordering.algorithms[i]) for i in self.candidates):
            if len(self.candidates) > 1 or self.passes or self._remember:
                return self._apply_matching
            # A single algorithm usually does not match, and this is faster than the loop of `_apply_matching`.
            event, state, candidates, apply = self.event, self._state, self.candidates, self._apply_in_order
            ((_, match),) = self._matches
            return lambda: apply(candidates) if match(event, state) else {}
        if self.passes or self._reorder or self._remember:
            return partial(self._apply_in_order, self.candidates)
        return self._calls_in(self._order(self.candidates, ())).run

    def _apply_matching(self) -> Traces:
        event, state = self.event, self._state
        matching: tuple[int, ...] = ()
        for i, match in self._matches:  # a comprehension would be another call, and most match nothing
            if match(event, state):
                matching = (*matching, i)
        return self._apply_in_order(matching) if matching or self.passes or self._remember else {}

    def _apply_in_order(self, matching: tuple[int, ...]) -> Traces:
        acted = self._acted.get(self._opener, ()) if self._reorder and self._opener else ()
        if self.passes:
            return self._apply_passed(self._order(matching, acted))
        if (matching, acted) not in self._matched:
            self._matched[matching, acted] = self._calls_in(self._order(matching, acted))
        calls = self._matched[matching, acted]
        if self._remember:
            self._acted[self.event] = calls.order
        return calls.run()

    def _order(self, matching: tuple[int, ...], acted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order of matching algorithms, of which `acted` acted at the first event of the pair."""
        if self._replace:
            return tuple(sorted(matching))
        return self.ordering.backward(tuple(sorted(matching)), acted) if self.event.is_after_event else matching

    def _apply_passed(self, order: Sequence[int]) -> Traces:
        """Apply the result of the passes, which may reorder the algorithms or leave some out."""
        algorithms: Sequence[Algorithm] = [self.ordering.algorithms[i] for i in order]
        for algorithm_pass in self.passes:
            algorithms = algorithm_pass(algorithms, self.event)
            if not isinstance(algorithms, Sequence):
                raise TypeError(
                    f"A pass must return a list of algorithms, got {algorithms!r} from "
                    f"{algorithm_pass!r}. Return its first argument, reordered."
                )
        indices = tuple(self._index.get(id(algorithm), -1) for algorithm in algorithms)
        if any(i not in self._keys for i in indices):
            raise ValueError(
                f"A pass must return algorithms that act at {self.event}, got {algorithms!r}. Return those that it "
                f"gets, reordered or without some."
            )
        if self._remember:
            self._acted[self.event] = indices
        return self._calls_in(indices).run()

    def _calls_in(self, order: tuple[int, ...]) -> _Calls:
        """Return the calls of the algorithms in an order, which are made once per order."""
        if order in self._calls:
            return self._calls[order]
        event, state, logger, names = self.event, self._state, self._logger, self._names
        calls: list[tuple[_Apply, str, Trace]] = [
            (self._applied[i].apply, self._keys[i], Trace(names[i], event, None, position, True))
            for position, i in enumerate(order)
        ]
        logged = {f"algorithm_traces/{names[i]}/{event}": 1 for i in order}

        def run() -> Traces:
            traces = {}
            for apply, key, trace in calls:
                exit_code = apply(event, state, logger)
                traces[key] = trace if exit_code is None else replace(trace, exit_code=exit_code)
            if logger.destinations:
                logger.log_traces(logged)
            return traces

        self._calls[order] = _Calls(order, run)
        return self._calls[order]


def _free_key(name: str, event: Event, taken: Container[str]) -> str:
    """Return the key `"{algorithm}/{event}"` of a trace; algorithms with the same `str` are numbered."""
    count = 1
    while (key := f"{name}/{event}" if count == 1 else f"{name}#{count}/{event}") in taken:
        count += 1
    return key


def _then(
    hooks: Sequence[Callable[[State, Logger], Any]], apply: Callable[[], Traces] | None, state: State, logger: Logger
) -> Callable[[], Traces]:
    """Return a function that applies algorithms, if there are any, and then calls the hooks."""

    def run() -> Traces:
        traces = {} if apply is None else apply()
        for hook in hooks:
            hook(state, logger)
        return traces

    return run


def _compile_and_run(engine: weakref.ref[Engine], event: Event) -> Traces:
    """Compile the events of an engine and run one of them: the entry of `Engine.dispatch` after a change."""
    current = engine()
    assert current is not None, "only an engine's loop has its dispatch"
    current._compile()
    return current.run_event(event)


def _without_reference(method: Callable[[], T]) -> Callable[[], T | None]:
    """Return a function that calls a bound method without keeping its object alive; None once the object is gone."""
    weak = weakref.WeakMethod(method)

    def call() -> T | None:
        bound = weak()
        return None if bound is None else bound()

    return call


def _safe_hook(callback: Callback, event: Event) -> Callable[[State, Logger], Any]:
    """Return the method of a callback for an event. A failure of a logger is reported and does not end the run."""
    hook: Callable[[State, Logger], Any] = partial(callback.run_event, event)
    if dispatches_by_name(callback):
        hook = getattr(callback, event.value)
    if not isinstance(callback, LoggerDestination):
        return hook
    # Wrong arguments must raise when the run is set up, but a service that is down may come back.
    caught = (ConnectionError, TimeoutError) if event is Event.INIT else Exception

    def run(state: State, logger: Logger) -> None:
        try:
            hook(state, logger)
        except caught as error:
            record_failure(callback, event.value, error)

    return run


def _missing(event: Event, state: State) -> str | None:
    if event not in _WITHOUT_DATALOADER and state.dataloader is None:
        return "`state.dataloader` is not set. Pass `dataloader=` to `State`, or call `state.set_dataloader`."
    if event not in _WITHOUT_DURATION and state.max_duration is None:
        return "`state.max_duration` is not set. Pass `max_duration=` to `State`, for example '10ep'."
    return None


def _run_init(
    algorithms: AlgorithmPlan | None, hooks: Sequence[Callable[[State, Logger], Any]], state: State, logger: Logger
) -> Traces:
    for callback in state.callbacks:
        # A copy of an open callback has the attribute too, but another id: it is not open.
        if getattr(callback, "_opened_as", None) == id(callback):
            raise RuntimeError(
                f"Cannot create a new trainer with an open callback or logger from a previous trainer: "
                f"`{type(callback).__name__}` is still open. Call `trainer.close()` or `engine.close()` first, or "
                f"create a new callback."
            )
    for callback in state.callbacks:
        callback._opened_as = id(callback)
    for algorithm in state.algorithms:
        algorithm._initialized_in = id(algorithm), id(state)
    for hook in hooks:
        hook(state, logger)
    return {} if algorithms is None else algorithms.compile()()


def _check_owned(state: State, logger: Logger) -> None:
    """Raise ValueError if an algorithm with a state of its own is used by a run that was created later."""
    for algorithm in state.algorithms:
        owner = getattr(algorithm, "_initialized_in", None)
        # A copy has another id: it belongs to no run.
        if owner is None or owner[0] != id(algorithm) or owner[1] == id(state):
            continue
        if algorithm.state_dict().keys() - {"repr"}:
            name = type(algorithm).__name__
            raise ValueError(
                f"`algorithms` must not be shared between runs, but a run that was created later uses the same "
                f"`{name}` object, and both would change its state. Create one object per run: "
                f"`algorithms=[{name}(...)]`."
            )


def _prefix(event: Event, state: State) -> str:
    parts = [f"[ep={int(state.timestamp.epoch)}][ba={int(state.timestamp.batch)}]"]
    if event.is_eval:
        parts.append(f"[eval_ba={int(state.eval_timestamp.batch)}]")
    if event.is_predict:
        parts.append(f"[predict_ba={int(state.predict_timestamp.batch)}]")
    return f"{''.join(parts)}[event={event.name}]"


def _logged(callback: Callback, hook: Callable[[State, Logger], Any], event: Event) -> Callable[[State, Logger], Any]:
    def run(state: State, logger: Logger) -> None:
        log.debug("%s: Running callback %s", _prefix(event, state), type(callback).__name__)
        hook(state, logger)

    return run


def _close(state: State, logger: Logger) -> None:
    """Close all callbacks. If one fails, log the error and close the others."""
    log.debug("Closing the engine.")
    failed = set()
    for callback in state.callbacks:
        log.debug("Closing callback %s", type(callback).__name__)
        try:
            callback.close(state, logger)
        except Exception:
            log.exception("Error running %s.close(). Skipping %s.post_close().", *[type(callback).__name__] * 2)
            failed.add(id(callback))
    for callback in state.callbacks:
        if id(callback) in failed:
            continue
        log.debug("Post-closing callback %s", type(callback).__name__)
        try:
            callback.post_close()
            callback._opened_as = None
        except Exception:
            log.exception("Error running %s.post_close().", type(callback).__name__)
    for destination in logger.destinations:
        log_failure_count(destination)
    # Persistent workers outlive the run, and torch has no public way to stop them.
    shut_down = getattr(getattr(state.train_dataloader, "_iterator", None), "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    log.debug("Engine closed.")
