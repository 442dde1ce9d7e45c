"""Markers of spans of code."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from composer.core import Timestamp
from composer.profiler.profiler_action import ProfilerAction

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler

F = TypeVar("F", bound=Callable[..., Any])


class Marker:
    """Marker of the start and end of a span of code. `Profiler.marker` creates one.

    A span is recorded if the schedule's action at its start is one of `actions`. Its end is then recorded too, whatever
    the action is by then, so that a span is either complete or absent.

    Args:
        profiler: The profiler, bound to a state.
        name: The name of the spans.
        actions: The actions of the schedule during which it is recorded.
        record_instant_on_start: Also record an instant event at the start.
        record_instant_on_finish: Also record an instant event at the end.
        categories: Categories that viewers can filter by.

    Example:
        As a context manager, as a decorator, or with `start` and `finish`::

            marker = profiler.marker("augment")
            with marker:
                images = augment(images)


            @profiler.marker("tokenize")
            def tokenize(text): ...


            marker.start()
            marker.finish()
    """

    def __init__(
        self,
        profiler: Profiler,
        name: str,
        actions: Sequence[ProfilerAction],
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Sequence[str] = (),
    ) -> None:
        self.name, self.actions, self.categories = name, tuple(actions), tuple(categories)
        self.record_instant_on_start, self.record_instant_on_finish = record_instant_on_start, record_instant_on_finish
        self._profiler = profiler
        self._started_ns: int | None = None
        self._recorded = False

    def start(self) -> None:
        """Start a span.

        Raises:
            RuntimeError: A span is open.
        """
        if self._started_ns is not None:
            raise RuntimeError(f"The marker {self.name!r} is already started. Call `finish()` first.")
        now = self._started_ns = time.time_ns()
        self._recorded = self._is_recorded()
        if self._recorded:
            timestamp = self._profiler.bound_state.timestamp
            self._record(True, timestamp, now)
            if self.record_instant_on_start:
                self._record_instant(timestamp, now)

    def finish(self) -> None:
        """End the span.

        Raises:
            RuntimeError: No span is open.
        """
        if self._started_ns is None:
            raise RuntimeError(f"The marker {self.name!r} is not started. Call `start()` first.")
        self._started_ns = None
        if self._recorded:
            timestamp, now = self._profiler.bound_state.timestamp, time.time_ns()
            self._record(False, timestamp, now)
            if self.record_instant_on_finish:
                self._record_instant(timestamp, now)

    def instant(self) -> None:
        """Record an event without duration."""
        if self._is_recorded():
            self._record_instant(self._profiler.bound_state.timestamp, time.time_ns())

    def counter(self, values: Mapping[str, int | float]) -> None:
        """Record values that change over time.

        Args:
            values: The values by name; they are shown on top of each other.
        """
        if self._is_recorded():
            timestamp, now = self._profiler.bound_state.timestamp, time.time_ns()
            for handler in self._profiler.trace_handlers:
                handler.process_counter_event(
                    name=self.name,
                    categories=self.categories,
                    timestamp=timestamp,
                    wall_clock_time_ns=now,
                    values=values,
                )

    def __enter__(self) -> Marker:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()

    @overload
    def __call__(self, func: None = None) -> Marker: ...

    @overload
    def __call__(self, func: F) -> F: ...

    def __call__(self, func: Callable[..., Any] | None = None) -> Any:
        """Mark every call of a function: `@marker` or `@marker()`. A recursive call is not marked.

        Args:
            func: The function.

        Returns:
            The wrapped function.
        """
        if func is None:
            return self

        @functools.wraps(func)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if self._started_ns is not None:
                return func(*args, **kwargs)
            with self:
                return func(*args, **kwargs)

        return marked

    def _is_recorded(self) -> bool:
        return self._profiler.schedule(self._profiler.bound_state) in self.actions

    def _record(self, is_start: bool, timestamp: Timestamp, now: int) -> None:
        for handler in self._profiler.trace_handlers:
            handler.process_duration_event(
                name=self.name,
                categories=self.categories,
                is_start=is_start,
                timestamp=timestamp,
                wall_clock_time_ns=now,
            )

    def _record_instant(self, timestamp: Timestamp, now: int) -> None:
        for handler in self._profiler.trace_handlers:
            handler.process_instant_event(
                name=self.name, categories=self.categories, timestamp=timestamp, wall_clock_time_ns=now
            )
