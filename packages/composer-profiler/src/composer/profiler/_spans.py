"""Collects what markers report, so that spans are whole and properly nested."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from composer.core import Timestamp
from composer.profiler._trace_files import TraceEvent
from composer.utils import dist

__all__ = ["Spans"]


class Spans:
    """Events of this process since they were last taken.

    In each thread spans are nested: one that ends while others within it have not ended ends those as well. A span is
    handed out when it has ended, so that every file holds whole spans. No two starts or ends in a thread have the same
    time; their order is the same wherever they are sorted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[TraceEvent] = []
        self._open: dict[int, list[TraceEvent]] = {}  # by thread, the outermost first
        self._last_us: dict[int, int] = {}
        self._threads: dict[int, str] = {}

    def duration(
        self, name: str, categories: Sequence[str], is_start: bool, timestamp: Timestamp, time_ns: int
    ) -> None:
        """Take the start or the end of a span; an end without a start is dropped."""
        with self._lock:
            event = self._event(name, categories, "B" if is_start else "E", time_ns, _progress(timestamp))
            tid = event["tid"]
            event["ts"] = self._last_us[tid] = max(event["ts"], self._last_us.get(tid, 0) + 1)
            opened = self._open.setdefault(tid, [])
            if is_start:
                opened.append(event)
            elif any(span["name"] == name for span in opened):
                self._end(opened, event)

    def instant(self, name: str, categories: Sequence[str], timestamp: Timestamp, time_ns: int) -> None:
        """Take something without duration."""
        with self._lock:
            self._done.append({**self._event(name, categories, "i", time_ns, _progress(timestamp)), "s": "p"})

    def counter(self, name: str, categories: Sequence[str], time_ns: int, values: Mapping[str, Any]) -> None:
        """Take values."""
        with self._lock:
            self._done.append(self._event(name, categories, "C", time_ns, dict(values)))

    def take(self) -> list[TraceEvent]:
        """What has ended, and happened, since the last time; by time."""
        with self._lock:
            taken, self._done = self._done, []
        return sorted(taken, key=lambda event: event["ts"])

    def forget(self, category: str) -> None:
        """Drop the spans of a category that have not ended."""
        with self._lock:
            for tid, opened in self._open.items():
                self._open[tid] = [span for span in opened if category not in span["cat"].split(",")]

    def end_all(self, timestamp: Timestamp, time_ns: int) -> None:
        """End all spans."""
        with self._lock:
            for tid, opened in self._open.items():
                if opened:
                    last = self._event(opened[0]["name"], (), "E", time_ns, _progress(timestamp))
                    at = max(last["ts"], self._last_us[tid] + 1)
                    self._last_us[tid] = at + len(opened)
                    self._end(opened, {**last, "tid": tid, "ts": at}, whole=True)

    @property
    def threads(self) -> dict[int, str]:
        """The names of the threads that reported something, by number."""
        return self._threads

    def _end(self, opened: list[TraceEvent], end: TraceEvent, whole: bool = False) -> None:
        """End the innermost span of a name, and all within it; `whole`: end them all."""
        while opened:
            span = opened.pop()
            self._done += [span, {**end, "name": span["name"], "cat": span["cat"]}]
            if not whole and span["name"] == end["name"]:
                return
            end = {**end, "ts": end["ts"] + 1}
            self._last_us[end["tid"]] = end["ts"]

    def _event(self, name: str, categories: Sequence[str], phase: str, time_ns: int, args: Any) -> TraceEvent:
        thread = threading.current_thread()
        main = thread is threading.main_thread()
        tid = os.getpid() if main else threading.get_native_id()
        self._threads.setdefault(tid, "Training loop" if main else thread.name)
        return {
            "name": name,
            "cat": ",".join(categories),
            "ph": phase,
            "ts": time_ns // 1000,
            "pid": dist.get_global_rank(),
            "tid": tid,
            "args": args,
        }


def _progress(timestamp: Timestamp) -> dict[str, int]:
    return {"epoch": timestamp._epoch, "batch": timestamp._batch}
