"""A profiler of torch's operations, kernels and memory."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch.profiler import ProfilerAction as TorchAction
from torch.profiler import ProfilerActivity

from composer.core import Callback, State, Timestamp
from composer.loggers import Logger
from composer.profiler._bound import path_of, profiler_of, remove_old, upload
from composer.profiler.profiler_action import ProfilerAction
from composer.profiler.utils import export_memory_timeline_html
from composer.utils import dist, ensure_folder_has_no_conflicting_files, format_name_with_dist, int_at_least

log = logging.getLogger(__name__)

_ACTIONS = {
    ProfilerAction.SKIP: TorchAction.NONE,
    ProfilerAction.WARMUP: TorchAction.WARMUP,
    ProfilerAction.ACTIVE: TorchAction.RECORD,
    ProfilerAction.ACTIVE_AND_SAVE: TorchAction.RECORD_AND_SAVE,
}


class TorchProfiler(Callback):
    """Profiler that runs `torch.profiler` with the schedule of the run's profiler and writes its traces.

    A trace is written at the end of an ACTIVE_AND_SAVE batch, and when an epoch of unknown length or the training ends
    during recording. It is also passed to the trace handlers, which add it to the timeline of the markers.

    **Events** INIT, AFTER_LOAD, FIT_START, EPOCH_START, BATCH_START, BATCH_END, EPOCH_END, FIT_END, CLOSE.
    **Cost** that of `torch.profiler` in batches of the warmup and recorded batches; none in others. At CLOSE a table of
    the operations of the last trace is logged at level INFO, if that is enabled.

    Args:
        folder: The folder of the traces; this and the next four may contain `{run_name}`, `{rank}` and the like.
        filename: The name of a trace; may also contain the time: `{batch}`. With `use_gzip`, ".gz" is appended.
        remote_file_name: The name of the trace for loggers that store files, or a URI; None: it is not uploaded.
        memory_filename: The name of a page that shows the memory over time, which needs matplotlib; None: it is not
            written.
        memory_remote_file_name: The name of that page for loggers that store files, or a URI; None: it is not
            uploaded.
        overwrite: True if files that are newer than the run may be replaced.
        use_gzip: True if traces are compressed.
        record_shapes: Record the shapes of tensors.
        profile_memory: Record allocations.
        with_stack: Record the source location of each operation.
        with_flops: Estimate the FLOPs of operations.
        num_traces_to_keep: The number of newest traces of this rank to keep; -1 keeps all.

    Attributes:
        profiler: The `torch.profiler.profile`; None before INIT.
        saved_traces: For each trace that is kept, oldest first: its time and its files.

    Raises:
        AssertionError: The names of the memory page do not end in ".html".
        ValueError: `num_traces_to_keep` is below -1.
        RuntimeError: At INIT: the run has no profiler.
        FileExistsError: Before training: the folder holds traces that are newer than the run.

    Differs: old traces are removed as `num_traces_to_keep` says.
    """

    def __init__(
        self,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        memory_filename: str | None = None,
        memory_remote_file_name: str | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html",
        overwrite: bool = False,
        use_gzip: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
        num_traces_to_keep: SupportsIndex = -1,
    ) -> None:
        keep = int_at_least("num_traces_to_keep", num_traces_to_keep, -1, hint="Use -1 to keep all.")
        if memory_filename is not None:
            for argument, name in (
                ("memory_filename", memory_filename),
                ("memory_remote_file_name", memory_remote_file_name),
            ):
                if name is not None and not name.endswith(".html"):
                    raise AssertionError(f"`{argument}` must end in '.html', got {name!r}.")
        self.folder, self.overwrite = os.path.expanduser(folder), overwrite
        self.filename, self.remote_file_name = (_compressed(n, use_gzip) for n in (filename, remote_file_name))
        self.memory_filename, self.memory_remote_file_name = memory_filename, memory_remote_file_name
        self.use_gzip, self.num_traces_to_keep = use_gzip, keep
        self.record_shapes, self.profile_memory = record_shapes, profile_memory
        self.with_stack, self.with_flops = with_stack, with_flops
        remote_page = None if memory_filename is None else memory_remote_file_name
        self.remote_filenames = [name for name in (self.remote_file_name, remote_page) if name is not None]
        self.profiler: torch.profiler.profile | None = None
        self.saved_traces: list[tuple[Timestamp, list[Path]]] = []
        self._running = self._checked = False
        self._batches = 0  # recorded since the last trace
        self._last: torch.profiler.profile | None = None  # the last one that has recorded

    def init(self, state: State, logger: Logger) -> None:
        profiler_of(state, type(self).__name__)
        self.saved_traces, self._running, self._checked, self._last = [], False, False, None
        self._make(state, logger)

    def after_load(self, state: State, logger: Logger) -> None:
        self._check_folder(state)

    fit_start = after_load

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._start(state, logger)

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.num_traces_to_keep == 0:  # handlers have read the last trace by now
            remove_old(self.saved_traces, 0)
        if not self._running:  # the run was resumed within an epoch
            self._start(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        assert self.profiler is not None
        self._batches += self.profiler.current_action in (TorchAction.RECORD, TorchAction.RECORD_AND_SAVE)
        length = state.dataloader_len
        if length is not None and state.timestamp.batches_in_epoch >= length.value:
            self._finish(state)  # schedules count from the start of each epoch
        else:
            self._add_metadata(state)
            with warnings.catch_warnings():  # each cycle is written separately
                warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
                self.profiler.step()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._finish(state)

    fit_end = epoch_end

    def close(self, state: State, logger: Logger) -> None:
        self._finish(state)
        if self.num_traces_to_keep == 0:
            remove_old(self.saved_traces, 0)
        if self._last is not None and log.isEnabledFor(logging.INFO):
            device = "cuda" if ProfilerActivity.CUDA in self._last.activities else "cpu"
            for order in dict.fromkeys(("self_cpu_time_total", f"self_{device}_time_total")):
                log.info("%s", self._last.key_averages().table(sort_by=order, row_limit=20))
        self._last = None

    def _check_folder(self, state: State) -> None:
        if self._checked:
            return
        self._checked = True
        if not self.overwrite:
            folder = format_name_with_dist(self.folder, state.run_name)
            for name in (self.filename, self.memory_filename):
                if name is not None:
                    ensure_folder_has_no_conflicting_files(folder, name, state.timestamp)
        dist.barrier()  # no rank writes before all have checked

    def _make(self, state: State, logger: Logger) -> None:
        activities = [ProfilerActivity.CPU]
        if state.device.name == "gpu":
            activities.append(ProfilerActivity.CUDA)
        schedule = profiler_of(state, type(self).__name__).schedule
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=lambda _: _ACTIONS[schedule(state)],
            on_trace_ready=lambda profiler: self._save(profiler, state, logger),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )

    def _start(self, state: State, logger: Logger) -> None:
        self._finish(state)
        self._make(state, logger)
        assert self.profiler is not None
        self._batches = 0
        self.profiler.start()
        self._running = True

    def _finish(self, state: State) -> None:
        if self._running and self.profiler is not None:
            self._running = False
            self._add_metadata(state)
            self.profiler.stop()

    def _add_metadata(self, state: State) -> None:
        """Add the rank and the time of its clock at the last barrier to the metadata of the trace."""
        assert self.profiler is not None
        if self.profiler.current_action not in (TorchAction.RECORD, TorchAction.RECORD_AND_SAVE):
            return
        metadata: dict[str, Any] = {"global_rank": dist.get_global_rank()}
        sync = profiler_of(state, type(self).__name__).clock_sync
        if sync is not None:
            metadata |= {
                "clock_sync_timestamp_us": sync.timestamp_us,
                "clock_sync_number": sync.number,
                "clock_sync_error_bound": sync.error_bound_us,
            }
        for name, value in metadata.items():
            self.profiler.add_metadata_json(name, json.dumps(value))

    def _save(self, profiler: Any, state: State, logger: Logger) -> None:
        if self._batches == 0:
            return  # the recording ended before the first batch did
        self._batches, self._last = 0, profiler
        path = path_of(state, self.folder, self.filename)
        unfinished = path.with_name(f".{os.getpid()}.{path.name}")  # a file can be renamed within a folder
        try:
            profiler.export_chrome_trace(os.fspath(unfinished))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        profiler_of(state, type(self).__name__).record_chrome_json_trace_file(path)
        uploads = [(self.remote_file_name, path)]
        if self.memory_filename is not None:
            page = path_of(state, self.folder, self.memory_filename)
            device = f"cuda:{torch.cuda.current_device()}" if state.device.name == "gpu" else "cpu"
            export_memory_timeline_html(profiler, page, device)
            uploads.append((self.memory_remote_file_name, page))
        self.saved_traces.append((state.timestamp, [file for _, file in uploads]))
        for name, file in uploads:
            upload(state, logger, name, file, self.overwrite)
        if self.num_traces_to_keep != 0:
            remove_old(self.saved_traces, self.num_traces_to_keep)


def _compressed(name: Any, use_gzip: bool) -> Any:
    return f"{name}.gz" if use_gzip and name is not None and not name.endswith(".gz") else name
