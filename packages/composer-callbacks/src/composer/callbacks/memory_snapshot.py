"""Record CUDA memory usage during some batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from composer.callbacks import _cuda_memory
from composer.core import Callback, State, Time, TimeUnit, ensure_time
from composer.loggers import Logger
from composer.utils import format_name_with_dist, format_name_with_dist_and_time, int_at_least


class MemorySnapshot(Callback):
    """Records every allocation of CUDA memory during some batches, once per run, and writes the history to files.

    `<filename>.pickle` can be opened at https://pytorch.org/memory_viz; `<filename>.html` shows the memory over time.
    The page loads the viewer of torch from the network when it is opened.

    **Events** INIT (warns without a CUDA device), BATCH_START, BATCH_END, CLOSE.
    **Cost** slower allocations during these batches, because stack traces are recorded.

    Args:
        skip_batches: Number of batches of this process before the recording.
        interval: Number of batches to record.
        max_entries: Number of allocations and frees to store; the oldest are dropped.
        folder: The folder of the files; may contain `{run_name}`, `{rank}` and the like.
        filename: Their name without an extension; may also contain the time: `{batch}` is the last recorded batch.
        remote_file_name: The folder for loggers that store files; None: no upload.
        overwrite: Replace existing files.

    Raises:
        ValueError: An argument is out of range.
        FileExistsError: At the start of the recording, if the file exists and `overwrite` is False.
    """

    def __init__(
        self,
        skip_batches: SupportsIndex = 1,
        interval: SupportsIndex | str | Time[Any] = "3ba",
        max_entries: SupportsIndex = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
    ) -> None:
        self.skip_batches = int_at_least("skip_batches", skip_batches, 0, "batches", "Use 1.")
        self.interval: Time[Any] = ensure_time(interval, TimeUnit.BATCH, argument="interval")
        if self.interval.unit is not TimeUnit.BATCH or self.interval.value < 1:
            raise ValueError(f"`interval` must be a number of batches, at least 1, got {interval!r}. Use '3ba'.")
        self.max_entries = int_at_least("max_entries", max_entries, 1, "event", "Use 100000.")
        self.folder, self.filename = os.path.expanduser(folder), filename
        self.remote_file_name, self.overwrite = remote_file_name, overwrite
        self._enabled = self._recording = False
        self._remaining_to_skip, self._end = self.skip_batches, 0

    def init(self, state: State, logger: Logger) -> None:
        self._enabled = _cuda_memory.check_gpu(state, "MemorySnapshot")
        self._remaining_to_skip, self._recording = self.skip_batches, False

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self._enabled or self._recording:
            return
        if self._remaining_to_skip > 0:
            self._remaining_to_skip -= 1
            return
        self._end = state.timestamp.batches + self.interval.value
        path = self._path(state)
        if not self.overwrite:
            _cuda_memory.check_absent(path, "MemorySnapshot")
        path.parent.mkdir(parents=True, exist_ok=True)
        _cuda_memory.record(self.max_entries)
        self._recording = True

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._recording or state.timestamp.batches < self._end:
            return
        from torch.cuda import _memory_viz

        snapshot = torch.cuda.memory._snapshot()
        _cuda_memory.stop(self.max_entries)
        self._recording = self._enabled = False
        path = _cuda_memory.write(snapshot, self._path(state))
        page = _cuda_memory.write(snapshot, path.with_suffix(".html"), _memory_viz.trace_plot)
        for file in (path, page):
            remote = None if self.remote_file_name is None else f"{self.remote_file_name}/{file.name}"
            _cuda_memory.upload(logger, remote, file, self.overwrite)

    def close(self, state: State, logger: Logger) -> None:
        if self._recording:
            _cuda_memory.stop(self.max_entries)
        self._recording = False

    def _path(self, state: State) -> Path:
        folder = format_name_with_dist(self.folder, state.run_name)
        name = format_name_with_dist_and_time(self.filename, state.run_name, state.timestamp, batch=self._end)
        return Path(folder, f"{name}.pickle")
