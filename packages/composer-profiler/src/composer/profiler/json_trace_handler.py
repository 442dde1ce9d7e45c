"""A trace handler that writes profiles in Chrome's trace format and merges the profiles of all ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from composer.core import State, Timestamp
from composer.loggers import Logger
from composer.profiler._bound import path_of, profiler_of, remove_old, upload
from composer.profiler._traces import TraceEvent, merge_traces, metadata_event, write_trace
from composer.profiler.profiler_action import ProfilerAction
from composer.profiler.trace_handler import TraceHandler
from composer.utils import (
    dist,
    ensure_folder_has_no_conflicting_files,
    format_name_with_dist,
    int_at_least,
)
from composer.utils.empty_folder import ensure_folder_is_empty


class JSONTraceHandler(TraceHandler):
    """Trace handler that writes each cycle of a profile as one file per rank, and all of them as one timeline.

    Open `merged_trace.json` at https://ui.perfetto.dev or chrome://tracing. Each rank is a process; markers are spans
    of its first thread, and what torch's profiler recorded follows below.

    A file is written at the end of an ACTIVE_AND_SAVE batch, and at the end of `fit` if there are new events. It holds
    the spans that have ended; an epoch is in the file that is written after its end. If training fails, each rank
    writes a file when the engine closes. A single process also merges its file; merge the files of several ranks with
    `python -m composer.profiler.json_trace_merger`.

    **Events** INIT, AFTER_LOAD, FIT_START, BATCH_START, BATCH_END, EPOCH_END, FIT_END, CLOSE.
    **Cost** about 2 microseconds for each start and end; when a file is written, ranks wait for each other.

    Args:
        folder: The folder; this and the next four may contain `{run_name}`, `{rank}` and the like.
        filename: The name of a rank's file of a cycle; may also contain the time: `{epoch}`, `{batch}`.
        remote_file_name: The name of that file for loggers that store files, or a URI; None: it is not uploaded.
        merged_trace_filename: The name of the merged file; None: nothing is merged. Each node merges the files of its
            ranks: if nodes share a file system, put `{node_rank}` into the name.
        merged_trace_remote_file_name: The name of the merged file for loggers that store files, or a URI; None: it is
            not uploaded.
        overwrite: True if files in the folder may be replaced; otherwise it must be empty, or hold nothing newer than
            the moment from which a run is resumed.
        num_traces_to_keep: The number of newest cycles whose files are kept; -1 keeps all. The merged file holds all.

    Attributes:
        saved_traces: For each cycle that is kept, oldest first: its time and the files of all ranks.

    Raises:
        ValueError: `num_traces_to_keep` is below -1.
        RuntimeError: At INIT: the run has no profiler.
        FileExistsError: Before training: the folder holds files.

    Differs: spans are properly nested and complete in each file, the merged file itself is uploaded, and no file is
    moved between file systems.
    """

    def __init__(
        self,
        folder: str = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        remote_file_name: str | None = "{run_name}/traces/ep{epoch}-ba{batch}-rank{rank}.json",
        merged_trace_filename: str | None = "merged_trace.json",
        merged_trace_remote_file_name: str | None = "{run_name}/traces/merged_trace.json",
        *,
        overwrite: bool = False,
        num_traces_to_keep: SupportsIndex = -1,
    ) -> None:
        keep = int_at_least("num_traces_to_keep", num_traces_to_keep, -1, hint="Use -1 to keep all.")
        self.folder = os.path.expanduser(folder)
        self.filename, self.remote_file_name = filename, remote_file_name
        self.merged_trace_filename = merged_trace_filename
        self.merged_trace_remote_file_name = merged_trace_remote_file_name
        self.overwrite, self.num_traces_to_keep = overwrite, keep
        self.remote_filenames = [name for name in (remote_file_name, merged_trace_remote_file_name) if name is not None]
        self._reset()

    def _reset(self) -> None:
        self.saved_traces: list[tuple[Timestamp, list[Path]]] = []
        self._spans = _Spans()
        self._torch_files: list[Path] = []
        self._own: list[Path] = []  # the files of this rank
        self._checked = self._merged = False
        self._saves = False  # whether the current batch ends a cycle
        self._resting = False  # between two calls of `fit`
        self._begun = False  # whether the run has started

    @property
    def merged_trace_path(self) -> str | None:
        """The path of the merged trace, with its variables; None if nothing is merged."""
        name = self.merged_trace_filename
        return None if name is None else os.path.join(self.folder, name)

    # ---- events of the profile ----

    def process_duration_event(
        self, name: str, categories: Sequence[str], is_start: bool, timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        if not self._resting:
            self._spans.duration(name, categories, is_start, timestamp, wall_clock_time_ns)

    def process_instant_event(
        self, name: str, categories: Sequence[str], timestamp: Timestamp, wall_clock_time_ns: int
    ) -> None:
        if not self._resting:
            self._spans.instant(name, categories, timestamp, wall_clock_time_ns)

    def process_counter_event(
        self,
        name: str,
        categories: Sequence[str],
        timestamp: Timestamp,
        wall_clock_time_ns: int,
        values: Mapping[str, int | float],
    ) -> None:
        if not self._resting:
            self._spans.counter(name, categories, wall_clock_time_ns, values)

    def process_chrome_json_trace_file(self, filepath: Path) -> None:
        self._torch_files.append(Path(filepath))

    # ---- events of the run ----

    def init(self, state: State, logger: Logger) -> None:
        profiler_of(state, type(self).__name__)
        self._reset()

    def after_load(self, state: State, logger: Logger) -> None:
        self._check_folder(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._check_folder(state)
        self._wake()

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._wake()

    predict_start = eval_standalone_start

    def batch_start(self, state: State, logger: Logger) -> None:
        # At BATCH_END the schedule already describes the next batch.
        action = profiler_of(state, type(self).__name__).schedule(state)
        self._saves = action is ProfilerAction.ACTIVE_AND_SAVE

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._saves:
            self._saves = False
            self._save(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        # An epoch of unknown length may have ended while torch's profiler recorded.
        if state.dataloader_len is None and any(dist.all_gather_object(bool(self._torch_files))):
            self._save(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._save(state, logger)
        self._spans.drop_open("fit_end")  # this event is still open while the file is written
        self._resting = True

    def close(self, state: State, logger: Logger) -> None:
        """Write the remaining events after an error. Ranks cannot wait for each other here: some may have failed."""
        if state.profiler is None or self._resting or not self._begun:
            return
        self._spans.end_all(state.timestamp, time.time_ns())
        events = self._spans.take()
        self._resting = True
        files = [*self._torch_files, *self._write(state, events)]
        self._torch_files = []
        if dist.get_world_size() == 1:
            self._merge(state, logger, files)

    def _wake(self) -> None:
        self._resting, self._begun = False, True

    def _check_folder(self, state: State) -> None:
        if self._checked:
            return
        self._checked = True
        folder = format_name_with_dist(self.folder, state.run_name)
        resumed = state.timestamp.batches > 0
        if not self.overwrite and resumed:
            ensure_folder_has_no_conflicting_files(folder, self.filename, state.timestamp)
        elif not self.overwrite:
            ensure_folder_is_empty(folder)
        merged = self._merged_path(state)
        self._merged = resumed and merged is not None and merged.exists()
        dist.barrier()  # no rank writes before all have checked

    def _merged_path(self, state: State) -> Path | None:
        path = self.merged_trace_path
        return None if path is None else Path(format_name_with_dist(path, state.run_name))

    def _save(self, state: State, logger: Logger) -> None:
        """Write the files of all ranks, merge and upload them. Call it on all ranks."""
        events = self._spans.take()
        written = self._write(state, events)
        torch_files, self._torch_files = self._torch_files, []
        gathered = dist.all_gather_object((dist.get_node_rank(), written, torch_files))
        traces = [path for _, own, _ in gathered for path in own]
        if not traces and not any(files for _, _, files in gathered):
            return
        for path in written:
            upload(state, logger, self.remote_file_name, path, self.overwrite)
        if dist.get_local_rank() == 0:
            node = dist.get_node_rank()
            self._merge(state, logger, [p for of, own, files in gathered if of == node for p in (*own, *files)])
        dist.barrier()  # the files are needed until they are merged
        if traces:
            self.saved_traces.append((state.timestamp, traces))
            remove_old(self.saved_traces, self.num_traces_to_keep, self._own)

    def _write(self, state: State, events: list[TraceEvent]) -> list[Path]:
        """Write this rank's file, if there are events."""
        if not any(event["ph"] != "C" for event in events):
            return []
        path = path_of(state, self.folder, self.filename)
        write_trace(path, [*self._about(state), *events])
        self._own.append(path)
        return [path]

    def _merge(self, state: State, logger: Logger, files: list[Path]) -> None:
        merged = self._merged_path(state)
        if merged is None or not files:
            return
        merge_traces(merged, *([merged] if self._merged else []), *files)
        self._merged = True
        upload(state, logger, self.merged_trace_remote_file_name, merged, overwrite=True)

    def _about(self, state: State) -> list[TraceEvent]:
        """Return metadata events: the names of this rank and its threads, and the time of its clock at a barrier."""
        rank, pid = dist.get_global_rank(), os.getpid()
        facts = [
            metadata_event("process_name", rank, pid, name=f"Rank {rank} training loop process"),
            metadata_event("global_rank", rank, pid, value=rank),
            metadata_event("process_sort_index", rank, pid, sort_index=rank),
        ]
        for tid, name in {pid: "Training loop", **self._spans.threads}.items():
            facts.append(metadata_event("thread_name", rank, tid, name=name))
            facts.append(metadata_event("thread_sort_index", rank, tid, sort_index=0))
        sync = profiler_of(state, type(self).__name__).clock_sync
        if sync is not None:
            number, time_us = sync.number, sync.timestamp_us
            facts.append(metadata_event("clock_sync_timestamp_us", rank, pid, value=time_us, number=number))
            facts.append(metadata_event("clock_sync_error_bound", rank, pid, value=sync.error_bound_us))
        return facts


class _Spans:
    """Events of this process since the last `take`.

    The spans of a thread are nested: a span that ends also ends all open spans inside it. `take` returns only spans
    that have ended, so that every file holds complete spans. No two starts or ends in a thread have the same time, so
    sorting by time keeps their order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[TraceEvent] = []
        self._open: dict[int, list[TraceEvent]] = {}  # the keys are threads; the outermost event is first
        self._last_us: dict[int, int] = {}
        self.threads: dict[int, str] = {}  # the names of the threads with events, by number

    def duration(
        self, name: str, categories: Sequence[str], is_start: bool, timestamp: Timestamp, time_ns: int
    ) -> None:
        """Add the start or the end of a span; an end without a start is dropped."""
        with self._lock:
            event = self._event(name, categories, "B" if is_start else "E", time_ns, _progress(timestamp))
            opened = self._open.setdefault(event["tid"], [])
            if is_start:
                opened.append(self._later(event))
            elif any(span["name"] == name for span in opened):
                self._end(opened, event, name)

    def instant(self, name: str, categories: Sequence[str], timestamp: Timestamp, time_ns: int) -> None:
        """Add an event without duration."""
        with self._lock:
            self._done.append({**self._event(name, categories, "i", time_ns, _progress(timestamp)), "s": "p"})

    def counter(self, name: str, categories: Sequence[str], time_ns: int, values: Mapping[str, Any]) -> None:
        """Add the values of a counter."""
        with self._lock:
            self._done.append(self._event(name, categories, "C", time_ns, dict(values)))

    def take(self) -> list[TraceEvent]:
        """Return the complete events since the last call, sorted by time."""
        with self._lock:
            taken, self._done = self._done, []
        return sorted(taken, key=lambda event: event["ts"])

    def drop_open(self, category: str) -> None:
        """Drop the open spans of a category."""
        with self._lock:
            for tid, opened in self._open.items():
                self._open[tid] = [span for span in opened if category not in span["cat"].split(",")]

    def end_all(self, timestamp: Timestamp, time_ns: int) -> None:
        """End all open spans."""
        with self._lock:
            for tid, opened in self._open.items():
                self._end(opened, {**self._event("", (), "E", time_ns, _progress(timestamp)), "tid": tid}, None)

    def _end(self, opened: list[TraceEvent], end: TraceEvent, name: str | None) -> None:
        """End the innermost span of a name and all spans inside it; None: all."""
        while opened:
            span = opened.pop()
            self._done += [span, self._later({**end, "name": span["name"], "cat": span["cat"]})]
            if span["name"] == name:
                return

    def _later(self, event: TraceEvent) -> TraceEvent:
        """Return an event at a time after all others in its thread."""
        tid = event["tid"]
        self._last_us[tid] = max(event["ts"], self._last_us.get(tid, 0) + 1)
        return {**event, "ts": self._last_us[tid]}

    def _event(self, name: str, categories: Sequence[str], phase: str, time_ns: int, args: Any) -> TraceEvent:
        thread = threading.current_thread()
        main = thread is threading.main_thread()
        tid = os.getpid() if main else threading.get_native_id()
        self.threads.setdefault(tid, "Training loop" if main else thread.name)
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
    return {"epoch": timestamp.epochs, "batch": timestamp.batches}
