"""Log the memory of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch

from composer.callbacks._cuda_memory import check_gpu
from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import dist, int_at_least

_NAMES = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


class MemoryMonitor(Callback):
    """Logs the statistics of the CUDA memory allocator of this rank after every batch.

    Allocated memory is used by tensors; active memory may also be freed memory that a stream still uses; inactive
    memory cannot be released because it is part of a larger block; reserved memory is held by torch. Peaks are those of
    the run so far. A retry is an allocation that had to empty the cache first, which is slow.

    **Events** INIT (warns without a CUDA device), AFTER_TRAIN_BATCH.
    **Cost** reads counters on the host; every `dist_aggregate_batch_interval` batches three small all-reduces.

    Args:
        memory_keys: The names to log by key of `torch.cuda.memory_stats`; None: those of the table in the README. Bytes
            are logged as gigabytes, counts unchanged.
        dist_aggregate_batch_interval: Interval, in batches, at which mean, minimum and maximum over ranks are logged;
            None: never.

    Raises:
        ValueError: `dist_aggregate_batch_interval` is below 1, or a key is unknown.
    """

    def __init__(
        self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: SupportsIndex | None = None
    ) -> None:
        interval = dist_aggregate_batch_interval
        if interval is not None:
            interval = int_at_least("dist_aggregate_batch_interval", interval, 1, "batch", "Use None for never.")
        self.memory_keys = None if memory_keys is None else dict(memory_keys)
        self.dist_aggregate_batch_interval = interval

    def init(self, state: State, logger: Logger) -> None:
        check_gpu(state, "MemoryMonitor")

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if state.device.name != "gpu":
            return
        report = _get_memory_report(self.memory_keys)
        logged: dict[str, Any] = {f"memory/{name}": value for name, value in report.items()}
        interval = self.dist_aggregate_batch_interval
        if interval is not None and state.timestamp.batches % interval == 0:
            logged.update(_over_ranks(report, state.device._device))
        logger.log_metrics(logged)


def _get_memory_report(memory_keys: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return statistics of the allocator of the current CUDA device by name; bytes in GB, with five digits."""
    names = _NAMES if memory_keys is None else memory_keys
    stats = torch.cuda.memory_stats_as_nested_dict()  # `memory_stats` flattens and sorts them, which takes longer
    report: dict[str, float] = {}
    for key, name in names.items():
        value: Any = stats
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, dict) or (value is None and stats):  # there are none before the first allocation
            known = ", ".join(torch.cuda.memory_stats())
            raise ValueError(f"`memory_keys` must be keys of `torch.cuda.memory_stats`, got {key!r}. Known: {known}.")
        value = value or 0
        report[name] = float(f"{value / 1e9:.5g}") if "bytes" in key else value
    return report


def _over_ranks(report: Mapping[str, float], device: torch.device) -> dict[str, DeferredValue]:
    """Reduce a report to mean, minimum and maximum over ranks, without synchronizing with the device."""
    local = torch.tensor(list(report.values()), dtype=torch.float32).to(device, non_blocking=True)
    metrics: dict[str, DeferredValue] = {}
    for suffix, operation in (("avg", "SUM"), ("min", "MIN"), ("max", "MAX")):
        values = local.clone()
        dist.all_reduce(values, operation)
        if suffix == "avg":
            values /= dist.get_world_size()
        for name, value in zip(report, values.unbind(), strict=True):
            metrics[f"memory/{name}_{suffix}"] = DeferredValue.of_tensor(value)
    return metrics
