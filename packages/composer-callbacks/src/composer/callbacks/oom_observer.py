"""Write CUDA memory usage to files when an allocation fails."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from composer.callbacks import _cuda_memory
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import format_name_with_dist, int_at_least

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SnapshotFileNameConfig:
    """Names of the files that `OOMObserver` writes.

    Attributes:
        snapshot_file: The snapshot, for https://pytorch.org/memory_viz.
        trace_plot_file: A page with the memory over time.
        segment_plot_file: A page with the contents of each segment.
        segment_flamegraph_file: A flame graph of segments by content.
        memory_flamegraph_file: A flame graph of memory by stack trace.
    """

    snapshot_file: str
    trace_plot_file: str
    segment_plot_file: str
    segment_flamegraph_file: str
    memory_flamegraph_file: str

    @classmethod
    def from_file_name(cls, filename: str) -> SnapshotFileNameConfig:
        """Create the names that start with `filename`, which has no extension."""
        return cls(
            snapshot_file=f"{filename}_snapshot.pickle",
            trace_plot_file=f"{filename}_trace_plot.html",
            segment_plot_file=f"{filename}_segment_plot.html",
            segment_flamegraph_file=f"{filename}_segment_flamegraph.svg",
            memory_flamegraph_file=f"{filename}_memory_flamegraph.svg",
        )

    def list_filenames(self) -> list[str]:
        """Return all names."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


class OOMObserver(Callback):
    """Writes CUDA memory usage to files when an allocation fails, before the error is raised.

    From INIT on torch records every allocation. When an allocation fails, the files of `SnapshotFileNameConfig` are
    written and passed to loggers that store files. The two flame graphs require the script `flamegraph.pl` of Brendan
    Gregg on the path. The pages load the viewer of torch from the network when they are opened.

    **Events** INIT (warns without a CUDA device), CLOSE.
    **Cost** slower allocations, because stack traces are recorded.

    Args:
        max_entries: Number of allocations and frees to store; the oldest are dropped.
        folder: The folder of the files; may contain `{run_name}`, `{rank}` and the like.
        filename: The prefix of their names.
        remote_file_name: The prefix of their names for loggers that store files; None: no upload.
        overwrite: Replace existing files.

    Raises:
        ValueError: `max_entries` is below 1.
        FileExistsError: At INIT, if such files exist and `overwrite` is False.

    Differs: no script is downloaded from the network and run. Errors while writing the files are logged, so that the
        error of the allocation is still raised. A second failure replaces the files of the first.
    """

    def __init__(
        self,
        max_entries: SupportsIndex = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom",
        overwrite: bool = False,
    ) -> None:
        self.max_entries = int_at_least("max_entries", max_entries, 1, "event", "Use 100000.")
        self.folder, self.filename = os.path.expanduser(folder), filename
        self.remote_file_name, self.overwrite = remote_file_name, overwrite
        self._run: tuple[State, Logger] | None = None
        self._is_attached = self._wrote = False

    def init(self, state: State, logger: Logger) -> None:
        if not _cuda_memory.check_gpu(state, "OOMObserver"):
            return
        if not self.overwrite:
            for path in self._paths(state):
                _cuda_memory.check_absent(path, "OOMObserver")
        _cuda_memory.record(self.max_entries)
        self._run, self._wrote = (state, logger), False
        if not self._is_attached:  # torch cannot detach an observer; `_observe` does nothing after the run
            attach: Callable[[Any], None] = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
            attach(partial(_observe, weakref.ref(self)))
            self._is_attached = True

    @property
    def _enabled(self) -> bool:  # the name is that of MosaicML's Composer, whose users read it
        return self._run is not None

    def close(self, state: State, logger: Logger) -> None:
        if self._run is not None:
            self._run = None
            _cuda_memory.stop(self.max_entries)

    def _paths(self, state: State) -> list[Path]:
        folder = format_name_with_dist(self.folder, state.run_name)
        name = format_name_with_dist(self.filename, state.run_name)
        return [Path(folder, file) for file in SnapshotFileNameConfig.from_file_name(name).list_filenames()]

    def _write(self, state: State, logger: Logger) -> None:
        snapshot = torch.cuda.memory._snapshot()
        paths = self._paths(state)
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        remotes: list[str | None] = [None] * len(paths)
        if self.remote_file_name is not None:
            remotes = list(SnapshotFileNameConfig.from_file_name(self.remote_file_name).list_filenames())
        overwrite, self._wrote = self.overwrite or self._wrote, True
        _cuda_memory.write(snapshot, paths[0])
        _cuda_memory.upload(logger, remotes[0], paths[0], overwrite)
        for path, remote, plot in zip(paths[1:], remotes[1:], _plots(), strict=True):
            if plot is not None:
                _cuda_memory.write(snapshot, path, plot)
                _cuda_memory.upload(logger, remote, path, overwrite)


def _plots() -> list[Callable[[Mapping[str, Any]], str] | None]:
    """Return the functions that create the files after the snapshot; None if a file cannot be created here."""
    from torch.cuda import _memory_viz as viz

    script = shutil.which("flamegraph.pl")
    if script is None:  # torch would download and run it
        return [viz.trace_plot, viz.segment_plot, None, None]
    draw = partial(viz.format_flamegraph, flamegraph_script=script)
    return [
        viz.trace_plot,
        viz.segment_plot,
        partial(viz.segments, format_flamegraph=draw),
        partial(viz.memory, format_flamegraph=draw),
    ]


def _observe(
    observer: weakref.ref[OOMObserver], device: int, requested: int, device_total: int, device_free: int
) -> None:
    """Handle a failed allocation; called by torch."""
    self = observer()
    if self is None or self._run is None:
        return
    log.warning(
        "GPU %s cannot allocate %s bytes (%s of %s bytes are free). Writing the use of its memory.",
        device,
        requested,
        device_free,
        device_total,
    )
    try:
        self._write(*self._run)
    except Exception:  # the error of the allocation, which torch raises next, matters more
        log.exception("The use of the memory could not be written.")
