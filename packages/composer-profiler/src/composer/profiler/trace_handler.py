"""The base class of trace handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from composer.core import Callback, Timestamp


class TraceHandler(Callback):
    """Base class of receivers of a profile's events. Override the methods it supports; it is also a callback.

    The methods may be called from several threads.

    Attributes:
        remote_filenames: The names of its files for loggers that store files.
    """

    remote_filenames: Sequence[str] = ()

    def process_duration_event(
        self, name: str, categories: Sequence[str], is_start: bool, timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Handle the start or the end of a span.

        Args:
            name: The name of the event.
            categories: Categories that viewers can filter by.
            is_start: True if it is the start; otherwise the end.
            timestamp: The training time.
            wall_clock_time_ns: The time in nanoseconds since 1970.
        """

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Handle an event without duration.

        Args:
            name: The name of the event.
            categories: Categories that viewers can filter by.
            timestamp: The training time.
            wall_clock_time_ns: The time in nanoseconds since 1970.
        """

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        """Handle the values of a counter.

        Args:
            name: The name of the counter.
            categories: Categories that viewers can filter by.
            timestamp: The training time.
            wall_clock_time_ns: The time in nanoseconds since 1970.
            values: The values by name; they are shown on top of each other.
        """

    def process_chrome_json_trace_file(self, filepath: Path) -> None:
        """Handle a file in Chrome's trace format, for example of torch's profiler.

        Args:
            filepath: The file. It exists until the end of the batch.
        """
