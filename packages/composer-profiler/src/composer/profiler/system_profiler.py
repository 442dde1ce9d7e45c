"""A profiler of processors, memory, disks and network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from composer.core import Callback, State
from composer.loggers import Logger
from composer.profiler._bound import profiler_of
from composer.profiler.profiler_action import ProfilerAction
from composer.utils import check_finite

log = logging.getLogger(__name__)

_GB = 2**30
_CUDA = {
    "allocated_bytes.all": "allocated_mem",
    "active_bytes.all": "active_mem",
    "inactive_split_bytes.all": "inactive_mem",
    "reserved_bytes.all": "reserved_mem",
}


class SystemProfiler(Callback):
    """Profiler of processors, memory, disks and network, in a background thread.

    Counters: `cpu` in percent of all processors; `memory/virtual` and `memory/swap`, used and free, and
    `memory/cuda/<name>` (`current_allocated_mem`, `peak_reserved_mem`, ...) of this rank's GPU in GiB (2**30 bytes);
    `disk/<device>/<field>` as psutil counts them, and `network/<interface>/kb_sent` and `kb_recv` (1024 bytes), all
    since INIT; devices without activity are left out. Nothing is measured while the schedule returns SKIP.

    **Events** INIT, CLOSE.

    Args:
        profile_cpu: Record the use of the processors.
        profile_memory: Record the use of memory.
        profile_disk: Record the reads and writes of disks.
        profile_net: Record the traffic of the network.
        stats_thread_interval_seconds: Seconds between two measurements.

    Raises:
        ValueError: The interval is not positive.
        RuntimeError: At INIT: the run has no profiler.

    Differs: memory is in GiB, each disk has its own counters, and disk and network are counted from INIT.
    """

    def __init__(
        self,
        profile_cpu: bool = True,
        profile_memory: bool = False,
        profile_disk: bool = False,
        profile_net: bool = False,
        stats_thread_interval_seconds: float = 0.5,
    ) -> None:
        check_finite("Use 0.5.", stats_thread_interval_seconds=stats_thread_interval_seconds, above=0)
        self.profile_cpu, self.profile_memory = profile_cpu, profile_memory
        self.profile_disk, self.profile_net = profile_disk, profile_net
        self.stats_thread_interval_seconds = stats_thread_interval_seconds
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def init(self, state: State, logger: Logger) -> None:
        profiler_of(state, type(self).__name__)
        self.close(state, logger)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._measure_repeatedly, args=(state, self._stop), name="System", daemon=True
        )
        self._thread.start()

    def close(self, state: State, logger: Logger) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _measure_repeatedly(self, state: State, stop: threading.Event) -> None:
        profiler = profiler_of(state, type(self).__name__)
        try:
            psutil.cpu_percent()  # the first value is meaningless
            start = self._totals()
            while not stop.wait(self.stats_thread_interval_seconds):
                if profiler.schedule(state) is ProfilerAction.SKIP:
                    continue
                for name, values in self._look(start, state).items():
                    profiler.marker(name, categories=[name.partition("/")[0]]).counter(values)
        except Exception:
            log.exception("The system profiler has stopped after an error; training continues.")

    def _look(self, start: Mapping[str, float], state: State) -> dict[str, dict[str, float]]:
        """Measure all counters, by name."""
        counters: dict[str, dict[str, float]] = {}
        if self.profile_cpu:
            counters["cpu"] = {"cpu_percent": psutil.cpu_percent()}
        if self.profile_memory:
            memory, swap = psutil.virtual_memory(), psutil.swap_memory()
            counters["memory/virtual"] = {"used_gib": memory.used / _GB, "available_gib": memory.available / _GB}
            counters["memory/swap"] = {"used_gib": swap.used / _GB, "free_gib": swap.free / _GB}
            if state.device.name == "gpu":
                counters.update(_cuda_memory(torch.cuda.memory_stats()))
        for name, value in self._totals().items():
            if since := value - start.get(name, 0):  # most devices of a machine are idle
                counters[name] = {name.rpartition("/")[2]: since}
        return counters

    def _totals(self) -> dict[str, float]:
        """Return the totals of disks and network since the system started."""
        totals: dict[str, float] = {}
        if self.profile_disk:
            for device, disk in (psutil.disk_io_counters(perdisk=True) or {}).items():
                totals.update({f"disk/{device}/{field}": value for field, value in disk._asdict().items()})
        if self.profile_net:
            for interface, net in (psutil.net_io_counters(pernic=True) or {}).items():
                totals[f"network/{interface}/kb_sent"] = net.bytes_sent / 1024
                totals[f"network/{interface}/kb_recv"] = net.bytes_recv / 1024
        return totals


def _cuda_memory(stats: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Convert the statistics of torch's allocator to counters."""
    found = {}
    for key, name in _CUDA.items():
        for when in ("current", "peak"):
            full = f"{when}_{name}"
            found[f"memory/cuda/{full}"] = {full: stats.get(f"{key}.{when}", 0) / _GB}
    return found
