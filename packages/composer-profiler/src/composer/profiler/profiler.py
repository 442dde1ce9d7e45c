"""The profiler of a run, and the comparison of the clocks of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import SupportsIndex

from composer.core import Callback, State
from composer.loggers import Logger
from composer.profiler.marker import Marker
from composer.profiler.profiler_action import ProfilerAction
from composer.profiler.system_profiler import SystemProfiler
from composer.profiler.torch_profiler import TorchProfiler
from composer.profiler.trace_handler import TraceHandler
from composer.utils import dist, ensure_tuple, is_uri

_NUM_BARRIERS = 10  # enough that in one of them probably no rank is interrupted

_ACTIONS = (ProfilerAction.WARMUP, ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)


@dataclass(frozen=True)
class ClockSync:
    """The time of a rank's clock when all ranks left a barrier.

    Attributes:
        number: The number of the barrier, the same on all ranks.
        timestamp_us: The time of this rank's clock, in microseconds since 1970.
        error_bound_us: By how much earlier the first rank may have left the barrier. The difference of two clocks is
            known up to the larger of their two bounds.
    """

    number: int
    timestamp_us: int
    error_bound_us: int

    @classmethod
    def measure(cls, number: int) -> ClockSync:
        """Pass several barriers and use the one with the shortest wait. Call it on all ranks.

        Args:
            number: The number of the measurement.
        """
        if dist.get_world_size() == 1:
            return cls(number, time.time_ns() // 1000, 0)
        dist.barrier()  # all ranks enter the next barrier at about the same time
        times = [time.time_ns() // 1000]
        for _ in range(_NUM_BARRIERS):
            dist.barrier()
            times.append(time.time_ns() // 1000)
        waits = [left - entered for entered, left in pairwise(times)]
        longest = [max(of_ranks) for of_ranks in zip(*dist.all_gather_object(waits), strict=True)]
        best = longest.index(min(longest))  # the same on all ranks
        return cls(number, times[best + 1], waits[best])


class Profiler(Callback):
    """Profiler of some batches of a run: events, algorithms, callbacks, your own markers, torch, and the system.

    Pass it as `Trainer(profiler=...)`. With an `Engine` of your own, call `bind_to_state(state)`.

    **Events** AFTER_LOAD, EPOCH_START, FIT_START, BATCH_START, and the markers of all of them.
    **Cost** a few microseconds for each algorithm and callback at each event, and the cost of torch's profiler in
    recorded batches. Ranks wait for each other when a cycle begins and when a trace is saved, so the schedule must
    return the same action on all ranks.

    Args:
        schedule: A function of the state that returns a `ProfilerAction`; see `cyclic_schedule`.
        trace_handlers: One handler or several, such as a `JSONTraceHandler`.
        sys_prof_cpu: Record the use of the processors.
        sys_prof_memory: Record the use of memory, of the host and the GPU.
        sys_prof_disk: Record the reads and writes of disks.
        sys_prof_net: Record the traffic of the network.
        sys_prof_stats_thread_interval_seconds: Seconds between two measurements of the system.
        torch_prof_folder: The folder of torch's traces; this and the next four are as in `TorchProfiler`.
        torch_prof_filename: The name of a trace.
        torch_prof_remote_file_name: The name for loggers that store files; None: it is not uploaded.
        torch_prof_memory_filename: The name of a page that shows the memory over time; None: it is not written.
        torch_prof_memory_remote_file_name: The name of that page for loggers that store files; None: it is not
            uploaded.
        torch_prof_overwrite: True if files that are newer than the run may be replaced.
        torch_prof_use_gzip: True if traces are compressed.
        torch_prof_record_shapes: Record the shapes of tensors.
        torch_prof_profile_memory: Record allocations.
        torch_prof_with_stack: Record the source location of each operation.
        torch_prof_with_flops: Estimate the FLOPs of operations. If these four are False, torch is not profiled.
        torch_prof_num_traces_to_keep: The number of newest traces to keep; -1 keeps all.

    Attributes:
        schedule: The schedule.
        state: The state of the run; None before `bind_to_state`.
        resumption_batch_idx: The batch of this epoch from which the run was resumed.
        clock_sync: The time of this rank's clock at the last common barrier; None before the first one.

    Raises:
        ValueError: `torch_prof_memory_filename` is given without the options that the memory timeline needs.
        TypeError: `schedule` is not callable.
    """

    def __init__(
        self,
        schedule: Callable[[State], ProfilerAction],
        trace_handlers: TraceHandler | Sequence[TraceHandler],
        sys_prof_cpu: bool = True,
        sys_prof_memory: bool = False,
        sys_prof_disk: bool = False,
        sys_prof_net: bool = False,
        sys_prof_stats_thread_interval_seconds: float = 0.5,
        torch_prof_folder: str = "{run_name}/torch_traces",
        torch_prof_filename: str = "rank{rank}.{batch}.pt.trace.json",
        torch_prof_remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        torch_prof_memory_filename: str | None = None,
        torch_prof_memory_remote_file_name: str
        | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html",
        torch_prof_overwrite: bool = False,
        torch_prof_use_gzip: bool = False,
        torch_prof_record_shapes: bool = False,
        torch_prof_profile_memory: bool = True,
        torch_prof_with_stack: bool = False,
        torch_prof_with_flops: bool = True,
        torch_prof_num_traces_to_keep: SupportsIndex = -1,
    ) -> None:
        if not callable(schedule):
            raise TypeError(f"`schedule` must be a function of the state, got {schedule!r}. Use `cyclic_schedule()`.")
        needed = torch_prof_with_stack and torch_prof_record_shapes and torch_prof_profile_memory
        if torch_prof_memory_filename is not None and not needed:
            raise ValueError(
                "`torch_prof_memory_filename` needs `torch_prof_with_stack`, `torch_prof_record_shapes` and "
                "`torch_prof_profile_memory` to be True: the categories of memory are derived from them."
            )
        self.schedule = schedule
        self.state: State | None = None
        self.resumption_batch_idx = 0
        self.clock_sync: ClockSync | None = None
        self._syncs = 0
        self._in_cycle = False
        self._markers: dict[str, Marker] = {}
        self._trace_handlers: list[TraceHandler] = list(ensure_tuple(trace_handlers))
        self._callbacks: list[Callback] = []
        if sys_prof_cpu or sys_prof_memory or sys_prof_disk or sys_prof_net:
            seconds = sys_prof_stats_thread_interval_seconds
            system = SystemProfiler(sys_prof_cpu, sys_prof_memory, sys_prof_disk, sys_prof_net, seconds)
            self._callbacks.append(system)
        if torch_prof_record_shapes or torch_prof_profile_memory or torch_prof_with_stack or torch_prof_with_flops:
            self._callbacks.append(
                TorchProfiler(
                    folder=torch_prof_folder,
                    filename=torch_prof_filename,
                    remote_file_name=torch_prof_remote_file_name,
                    memory_filename=torch_prof_memory_filename,
                    memory_remote_file_name=torch_prof_memory_remote_file_name,
                    overwrite=torch_prof_overwrite,
                    use_gzip=torch_prof_use_gzip,
                    record_shapes=torch_prof_record_shapes,
                    profile_memory=torch_prof_profile_memory,
                    with_stack=torch_prof_with_stack,
                    with_flops=torch_prof_with_flops,
                    num_traces_to_keep=torch_prof_num_traces_to_keep,
                )
            )

    @property
    def trace_handlers(self) -> list[TraceHandler]:
        """The trace handlers. May be set to one handler or several."""
        return self._trace_handlers

    @trace_handlers.setter
    def trace_handlers(self, value: TraceHandler | Sequence[TraceHandler]) -> None:
        self._trace_handlers[:] = ensure_tuple(value)

    @property
    def remote_filenames(self) -> list[str]:
        """The names of remote files that are URIs, for which the run needs an uploader."""
        sources = [*self._callbacks, *self._trace_handlers]
        names = [n for s in sources if isinstance(s, TorchProfiler | TraceHandler) for n in s.remote_filenames]
        return [name for name in names if is_uri(name)]

    @property
    def bound_state(self) -> State:
        """The state of the run.

        Raises:
            RuntimeError: The profiler is not bound to a state.
        """
        if self.state is None:
            raise RuntimeError(
                "The profiler is not bound to a run. Pass it as `Trainer(profiler=...)`, or call "
                "`profiler.bind_to_state(state)`."
            )
        return self.state

    def bind_to_state(self, state: State) -> None:
        """Profile a run: add the profiler, its parts and the trace handlers to the callbacks of the run.

        Args:
            state: The state of the run; its `profiler` is set.
        """
        self.state = state
        self._markers.clear()
        self.clock_sync, self._syncs, self._in_cycle, self.resumption_batch_idx = None, 0, False, 0
        state.callbacks.extend([self, *self._callbacks, *self._trace_handlers])
        state.profiler = self

    def marker(
        self,
        name: str,
        actions: Sequence[ProfilerAction | str] = _ACTIONS,
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Sequence[str] = (),
    ) -> Marker:
        """Return the marker of a name; the same object for the same name.

        Args:
            name: The name of the spans.
            actions: The actions of the schedule during which it is recorded.
            record_instant_on_start: Also record an instant event at the start.
            record_instant_on_finish: Also record an instant event at the end.
            categories: Categories that viewers can filter by.

        Raises:
            RuntimeError: The profiler is not bound to a state.
        """
        self.bound_state  # noqa: B018 - raises
        if name not in self._markers:
            self._markers[name] = Marker(
                self,
                name,
                [ProfilerAction(action) for action in actions],
                record_instant_on_start,
                record_instant_on_finish,
                categories,
            )
        return self._markers[name]

    def record_chrome_json_trace_file(self, filepath: str | Path) -> None:
        """Pass a file in Chrome's trace format to the trace handlers.

        Args:
            filepath: The file.
        """
        for handler in self.trace_handlers:
            handler.process_chrome_json_trace_file(Path(filepath))

    def after_load(self, state: State, logger: Logger) -> None:
        self.resumption_batch_idx = state.timestamp.batches_in_epoch

    def fit_start(self, state: State, logger: Logger) -> None:
        self._in_cycle = False
        self._synchronize()

    def epoch_start(self, state: State, logger: Logger) -> None:
        self.resumption_batch_idx = 0  # that index belongs to the resumed epoch

    def batch_start(self, state: State, logger: Logger) -> None:
        active = self.schedule(state) is not ProfilerAction.SKIP
        if active and not self._in_cycle:
            self._synchronize()
        self._in_cycle = active

    def close(self, state: State, logger: Logger) -> None:
        # After an error some markers are still open: finish the last one first.
        started = [(m._started_ns, m) for m in self._markers.values() if m._started_ns is not None]
        for _, marker in sorted(started, key=lambda pair: pair[0], reverse=True):
            marker.finish()

    def _synchronize(self) -> None:
        self.clock_sync = ClockSync.measure(self._syncs)
        self._syncs += 1
