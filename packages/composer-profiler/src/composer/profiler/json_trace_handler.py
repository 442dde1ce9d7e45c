"""Writes profiles in Chrome's trace format, and merges those of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from composer.core import State, Timestamp
from composer.loggers import Logger
from composer.profiler._bound import number_to_keep, numbered, numbered_name, path_of, profiler_of, remove_old, upload
from composer.profiler._merge import merge_traces
from composer.profiler._spans import Spans
from composer.profiler._trace_files import TraceEvent, write_trace
from composer.profiler.profiler_action import ProfilerAction
from composer.profiler.trace_handler import TraceHandler
from composer.utils import (
    dist,
    ensure_folder_has_no_conflicting_files,
    ensure_folder_is_empty,
    format_name_with_dist,
)

__all__ = ["JSONTraceHandler"]


class JSONTraceHandler(TraceHandler):
    """Writes each cycle of a profile as a file per rank, and all of them as one timeline.

    Open `merged_trace.json` at https://ui.perfetto.dev or chrome://tracing. Each rank is a process; markers are spans
    of its first thread, and what torch's profiler recorded follows below.

    A file is written at the end of an ACTIVE_AND_SAVE batch, and at the end of `fit` if there is more by then. It holds
    the spans that have ended; an epoch is in the file that was written after its end. If training ends with an error,
    what was recorded is written when the engine closes, as a file per rank; one process also merges it, and several
    ranks' are merged by `python -m composer.profiler.json_trace_merger`.

    **Events** INIT, AFTER_LOAD, FIT_START, BATCH_START, BATCH_END, EPOCH_END, FIT_END, CLOSE.
    **Cost** about 2 microseconds for each start and end; when a file is written, ranks wait for each other.

    Args:
        folder: The folder; this and the next four may contain `{run_name}`, `{rank}` and the like.
        filename: The name of a rank's file of a cycle; may contain the time, too: `{epoch}`, `{batch}`.
        remote_file_name: Its name for loggers that store files, or a URI; None: none.
        merged_trace_filename: The name of the merged file; None: nothing is merged. On several nodes each merges its
            own: if they share a file system, put `{node_rank}` into the name.
        merged_trace_remote_file_name: Its name for loggers that store files, or a URI; None: none.
        overwrite: Whether files in the folder may be replaced; otherwise it must be empty, or hold nothing newer than
            the moment from which a run is resumed.
        num_traces_to_keep: Cycles whose files are kept, the newest; -1 keeps all. The merged file holds all.

    Attributes:
        saved_traces: The time and the files, of all ranks, of each cycle that is kept; oldest first.

    Raises:
        ValueError: `num_traces_to_keep` is below -1.
        RuntimeError: At INIT: the run has no profiler.
        FileExistsError: Before training: the folder holds files.

    Differs: spans are always properly nested and whole in each file, the merged file is uploaded itself, and files are
    never moved from one file system to another.
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
        keep = number_to_keep(num_traces_to_keep)
        self.folder = os.path.expanduser(folder)
        self.filename, self.remote_file_name = filename, remote_file_name
        self.merged_trace_filename = merged_trace_filename
        self.merged_trace_remote_file_name = merged_trace_remote_file_name
        self.overwrite, self.num_traces_to_keep = overwrite, keep
        self.remote_filenames = [name for name in (remote_file_name, merged_trace_remote_file_name) if name is not None]
        self._reset()

    def _reset(self) -> None:
        self.saved_traces: list[tuple[Timestamp, list[Path]]] = []
        self._spans = Spans()
        self._torch_files: list[Path] = []
        self._written: list[Path] = []  # the names of files, before they are numbered
        self._own: list[Path] = []  # the files of this rank
        self._again = 0
        self._checked = self._merged = False
        self._saves = False  # whether this batch is to be saved
        self._resting = False  # between two calls of `fit`
        self._begun = False  # whether there was anything but the construction of the run

    @property
    def merged_trace_path(self) -> str | None:
        """Where the merged trace goes, with variables still in it; None: nothing is merged."""
        name = self.merged_trace_filename
        return None if name is None else os.path.join(self.folder, name)

    # ---- what is recorded ----

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

    # ---- when it is written ----

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

    def predict_start(self, state: State, logger: Logger) -> None:
        self._wake()

    def batch_start(self, state: State, logger: Logger) -> None:
        # At the end of the batch, the schedule speaks of the next one.
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
        self._spans.forget("fit_end")  # the event at which this is written cannot be in it as a whole
        self._resting = True

    def close(self, state: State, logger: Logger) -> None:
        """Write what is left, after an error. Ranks cannot wait for each other here: some may be gone."""
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
        resumed = state.timestamp._batch > 0
        if not self.overwrite and resumed:
            ensure_folder_has_no_conflicting_files(folder, self.filename, state.timestamp)
        elif not self.overwrite:
            ensure_folder_is_empty(folder)
        merged = self._merged_path(state)
        self._merged = resumed and merged is not None and merged.exists()
        dist.barrier()  # no rank writes while another one still looks

    def _merged_path(self, state: State) -> Path | None:
        path = self.merged_trace_path
        return None if path is None else Path(format_name_with_dist(path, state.run_name))

    def _save(self, state: State, logger: Logger) -> None:
        """Write the files of all ranks, merge and upload them. To be called by all ranks."""
        events = self._spans.take()
        written = self._write(state, events)
        torch_files, self._torch_files = self._torch_files, []
        gathered = dist.all_gather_object((dist.get_node_rank(), written, torch_files))
        traces = [path for _, own, _ in gathered for path in own]
        if not traces and not any(files for _, _, files in gathered):
            return
        for path in written:
            upload(state, logger, self._remote_name(), path, self.overwrite)
        if dist.get_local_rank() == 0:
            node = dist.get_node_rank()
            self._merge(state, logger, [p for of, own, files in gathered if of == node for p in (*own, *files)])
        dist.barrier()  # until merged, the files are needed
        if traces:
            self.saved_traces.append((state.timestamp, traces))
            remove_old(self.saved_traces, self.num_traces_to_keep, self._own)

    def _write(self, state: State, events: list[TraceEvent]) -> list[Path]:
        """Write this rank's file, if there is anything to write."""
        if not any(event["ph"] != "C" for event in events):
            return []
        path = path_of(state, self.folder, self.filename)
        self._again = self._written.count(path)  # two calls of `fit` may save at the same batch
        self._written.append(path)
        path = numbered(path, self._again)
        write_trace(path, [*self._about(state), *events])
        self._own.append(path)
        return [path]

    def _remote_name(self) -> str | None:
        """The remote name of the file written last."""
        return None if self.remote_file_name is None else numbered_name(self.remote_file_name, self._again)

    def _merge(self, state: State, logger: Logger, files: list[Path]) -> None:
        merged = self._merged_path(state)
        if merged is None or not files:
            return
        merge_traces(merged, *([merged] if self._merged else []), *files)
        self._merged = True
        upload(state, logger, self.merged_trace_remote_file_name, merged, overwrite=True)

    def _about(self, state: State) -> list[TraceEvent]:
        """Events that name this rank and its threads, and say how its clock compares to the others'."""
        rank, pid = dist.get_global_rank(), os.getpid()

        def fact(name: str, tid: int = pid, /, **args: Any) -> TraceEvent:
            return {"name": name, "ph": "M", "pid": rank, "tid": tid, "args": args}

        facts = [
            fact("process_name", name=f"Rank {rank} training loop process"),
            fact("global_rank", value=rank),
            fact("process_sort_index", sort_index=rank),
        ]
        for tid, name in {pid: "Training loop", **self._spans.threads}.items():
            facts += [fact("thread_name", tid, name=name), fact("thread_sort_index", tid, sort_index=0)]
        sync = profiler_of(state, type(self).__name__).clock_sync
        if sync is not None:
            facts += [
                fact("clock_sync_timestamp_us", value=sync.timestamp_us, number=sync.number),
                fact("clock_sync_error_bound", value=sync.error_bound_us),
            ]
        return facts
