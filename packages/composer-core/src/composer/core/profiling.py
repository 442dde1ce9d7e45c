"""Marks, for a profiler, when events, algorithms and callbacks begin and end. Nothing here runs without a profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer.core.event import Event

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.state import State
    from composer.loggers.logger import Logger

__all__ = ["EventMarkers", "RunMarker", "RunProfiler"]

_ACTIONS = ("warmup", "active", "active_and_save")
# So rare that they are recorded while batches are skipped, too: they show where in the run a profile was taken.
_ALWAYS = frozenset({Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END})


class RunMarker(Protocol):
    """What the engine calls when something begins and ends."""

    def start(self) -> None:
        """It begins."""

    def finish(self) -> None:
        """It ends."""


class RunProfiler(Protocol):
    """What `State.profiler` must offer; `composer.profiler.Profiler` does."""

    def marker(
        self,
        name: str,
        actions: Sequence[Any] = ...,
        record_instant_on_start: bool = ...,
        record_instant_on_finish: bool = ...,
        categories: Sequence[str] = ...,
    ) -> RunMarker:
        """A marker, the same for the same name.

        Args:
            name: What it marks.
            actions: When it is recorded: "skip", "warmup", "active", "active_and_save".
            record_instant_on_start: Whether to record the instant of the start, besides.
            record_instant_on_finish: Whether to record the instant of the end, besides.
            categories: What it can be filtered by.
        """


class EventMarkers:
    """The markers of one engine. They are always properly nested, whatever a loop leaves out.

    An event of a pair opens "event/<canonical name>" after it has run and closes it before the other one runs. What is
    still open inside is closed with it: an iteration without an end, an epoch that an error ended.

    Args:
        profiler: Takes the markers.
    """

    def __init__(self, profiler: RunProfiler) -> None:
        self.profiler = profiler
        self._open: list[tuple[str, RunMarker]] = []
        self._running: set[str] = set()

    def around(self, event: Event, run: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """What announces an event: `run`, and before or after it the marker of the pair."""
        if not (event.is_before_event or event.is_after_event):
            return run
        mark = self.marker_of(event)
        if event.is_before_event:

            def opening() -> Any:
                done = {} if run is None else run()
                mark()
                return done

            return opening

        def closing() -> Any:
            mark()
            return {} if run is None else run()

        return closing

    def marker_of(self, event: Event) -> Callable[[], None]:
        """What opens or closes the marker of an event's pair; nothing for an event that belongs to none."""
        name = event.canonical_name
        if event.is_before_event:
            actions = ("skip", *_ACTIONS) if event in _ALWAYS else _ACTIONS
            marker = self.profiler.marker(f"event/{name}", actions=actions)
            return lambda: self._begin(name, marker)
        return (lambda: self._end(name)) if event.is_after_event else (lambda: None)

    def algorithms(self, algorithms: Sequence[Algorithm], event: Event) -> list[_Marked]:
        """The algorithms, each marked while it is applied."""
        return [_Marked(a.apply, self._marker("algorithm", a, event), self._running) for a in algorithms]

    def hook(self, callback: Any, hook: Callable[[State, Logger], Any], event: Event) -> Callable[[State, Logger], Any]:
        """The method of a callback, marked while it runs."""
        return _Marked(hook, self._marker("callback", callback, event), self._running).apply

    def _marker(self, kind: str, what: Any, event: Event) -> tuple[str, RunMarker]:
        cls = type(what).__name__
        name = f"{kind}/{cls}/event/{event.value}"
        return name, self.profiler.marker(name, categories=[event.value, cls])

    def _begin(self, name: str, marker: RunMarker) -> None:
        self._end(name)  # an error may have kept the last one from ending
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
    """Runs something within a marker; within itself, without."""

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
