"""The base class of what takes a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from composer.core import Callback, Timestamp

__all__ = ["TraceHandler"]


class TraceHandler(Callback):
    """Takes what is profiled. Override what it can take; it is a callback as well.

    The methods may be called from several threads.

    Attributes:
        remote_filenames: The names under which loggers that store files are given its files.
    """

    remote_filenames: Sequence[str] = ()

    def process_duration_event(
        self, name: str, categories: Sequence[str], is_start: bool, timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Take the start or the end of something.

        Args:
            name: What it is.
            categories: What it can be filtered by.
            is_start: Whether it starts, otherwise it ends.
            timestamp: The training time.
            wall_clock_time_ns: When, in nanoseconds since 1970.
        """

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        """Take something without duration.

        Args:
            name: What it is.
            categories: What it can be filtered by.
            timestamp: The training time.
            wall_clock_time_ns: When, in nanoseconds since 1970.
        """

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        """Take values that change over time.

        Args:
            name: What they are.
            categories: What they can be filtered by.
            timestamp: The training time.
            wall_clock_time_ns: When, in nanoseconds since 1970.
            values: The values by name; they are shown on top of each other.
        """

    def process_chrome_json_trace_file(self, filepath: Path) -> None:
        """Take a file in Chrome's trace format, such as torch's profiler writes.

        Args:
            filepath: The file. It stays until the batch has ended.
        """
