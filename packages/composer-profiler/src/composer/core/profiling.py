"""Report to a profiler when events, algorithms and callbacks start and end. Without a profiler nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer.core.event import Event

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.logging import Logger
    from composer.core.state import State

_ACTIONS = ("warmup", "active", "active_and_save")
# Rare events, recorded also while the profiler skips batches: they show where in the run a profile was taken.
_RECORDED_ALWAYS = frozenset({Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END})


class RunMarker(Protocol):
    """A marker of a profiler: the engine calls it when something starts and ends."""

    def start(self) -> None:
        """Record the start."""

    def finish(self) -> None:
        """Record the end."""


class RunProfiler(Protocol):
    """The interface of `State.profiler`, which `composer.profiler.Profiler` implements."""

    def marker(
        self,
        name: str,
        actions: Sequence[Any] = ...,
        record_instant_on_start: bool = ...,
        record_instant_on_finish: bool = ...,
        categories: Sequence[str] = ...,
    ) -> RunMarker:
        """Return the marker of a name, the same object for the same name.

        Args:
            name: The name of the recorded span.
            actions: The profiler actions during which it is recorded: "skip", "warmup", "active", "active_and_save".
            record_instant_on_start: Also record an instant event at the start.
            record_instant_on_finish: Also record an instant event at the end.
            categories: Categories to filter by.
        """


class EventMarkers:
    """The markers of one engine. They are always properly nested, even if a loop skips events.

    The first event of a pair starts the marker "event/<canonical name>" after it has run; the second event ends it
    before it runs. Markers that are still open inside, such as that of an epoch that ended with an error, end too.

    Args:
        profiler: The profiler.
    """

    def __init__(self, profiler: RunProfiler) -> None:
        self.profiler = profiler
        self._open: list[tuple[str, RunMarker]] = []
        self._running: set[str] = set()

    def around(self, event: Event, run: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Return a function that calls `run` and, before or after it, the marker of the pair of the event."""
        if not (event.is_before_event or event.is_after_event):
            return run
        mark = self.marker_of(event)
        if event.is_before_event:

            def opening() -> Any:
                traces = {} if run is None else run()
                mark()
                return traces

            return opening

        def closing() -> Any:
            mark()
            return {} if run is None else run()

        return closing

    def marker_of(self, event: Event) -> Callable[[], None]:
        """Return a function that starts or ends the marker of an event's pair; it does nothing for other events."""
        name = event.canonical_name
        if event.is_before_event:
            actions = ("skip", *_ACTIONS) if event in _RECORDED_ALWAYS else _ACTIONS
            marker = self.profiler.marker(f"event/{name}", actions=actions)
            return lambda: self._begin(name, marker)
        return (lambda: self._end(name)) if event.is_after_event else (lambda: None)

    def algorithms(self, algorithms: Sequence[Algorithm], event: Event) -> list[_Marked]:
        """Return wrappers of the algorithms, whose `apply` runs within a marker."""
        return [_Marked(a.apply, self._marker("algorithm", a, event), self._running) for a in algorithms]

    def hook(self, callback: Any, hook: Callable[[State, Logger], Any], event: Event) -> Callable[[State, Logger], Any]:
        """Return the method of a callback, run within a marker."""
        return _Marked(hook, self._marker("callback", callback, event), self._running).apply

    def _marker(self, kind: str, actor: Any, event: Event) -> tuple[str, RunMarker]:
        cls = type(actor).__name__
        name = f"{kind}/{cls}/event/{event.value}"
        return name, self.profiler.marker(name, categories=[event.value, cls])

    def _begin(self, name: str, marker: RunMarker) -> None:
        self._end(name)  # after an error the previous one may still be open
        marker.start()
        self._open.append((name, marker))

    def _end(self, name: str) -> None:
        if not any(name == opened for opened, _ in self._open):
            return
        while True:
            opened, marker = self._open.pop()
            marker.finish()
            if opened == name:
                return


class _Marked:
    """A function that runs within a marker; a nested call of itself runs without."""

    def __init__(self, function: Callable[..., Any], named: tuple[str, RunMarker], running: set[str]) -> None:
        self._function, self._running = function, running
        self._name, self._marker = named

    def apply(self, *args: Any) -> Any:
        if self._name in self._running:
            return self._function(*args)
        self._marker.start()
        self._running.add(self._name)
        try:
            return self._function(*args)
        finally:
            self._running.discard(self._name)
            self._marker.finish()
