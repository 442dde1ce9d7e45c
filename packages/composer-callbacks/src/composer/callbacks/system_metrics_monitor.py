"""Log the utilization of the machine: processors, memory, disk, network and GPUs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psutil
import torch

from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import dist

_GPU_KEYS = ("gpu_percentage", "memory_percentage", "gpu_temperature_C", "gpu_power_usage_W")


class SystemMetricsMonitor(Callback):
    """Logs the utilization of this machine and its GPUs, at the start of a batch, at most once a second.

    Processors, memory, disk (that of the working directory) and network are those of the whole machine. GPUs are read
    through NVML, which requires the package `nvidia-ml-py`; values that a GPU does not support, such as the power of
    some models, are left out. With several ranks, the readings of all ranks are gathered on the device and logged one
    batch later, so that no step waits for them. For an evaluation or prediction, in which ranks may have different
    numbers of batches, the readings at its end are logged.

    **Events** INIT, BATCH_START, EVAL_BATCH_START, PREDICT_BATCH_START; EVAL_END, FIT_END, EVAL_STANDALONE_END,
    PREDICT_END, CLOSE.
    **Cost** some tenths of a millisecond on the host per second; with several ranks on GPUs, which are read at every
    batch, one small all-gather per batch.

    Args:
        log_all_data: Log the GPU of every rank, not only the minimum and maximum with their ranks.

    Raises:
        ImportError: The run is on a GPU, and `nvidia-ml-py` is not installed.

    Differs: the disk is that of the working directory; readings of other ranks are gathered without synchronization.
    """

    def __init__(self, log_all_data: bool = False) -> None:
        self.log_all_data = log_all_data
        self._nvml: Any = None
        self._handle: Any = None
        self._pending: list[DeferredValue] | None = None  # the concatenated readings of all ranks
        self._due = 0.0  # when to read the machine again

    def init(self, state: State, logger: Logger) -> None:
        psutil.cpu_percent()  # the first reading is meaningless
        self._pending, self._due = None, 0.0
        if state.device.name == "gpu" and self._nvml is None:
            self._nvml = _nvml()
            self._nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(state.device._device).uuid
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

    def batch_start(self, state: State, logger: Logger) -> None:
        self._log(logger)
        self._gather(state, logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self._log(logger)

    predict_batch_start = eval_batch_start

    def eval_end(self, state: State, logger: Logger) -> None:
        self._gather(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log_pending(logger)

    eval_standalone_end = fit_end

    def predict_end(self, state: State, logger: Logger) -> None:
        self._gather(state, logger)
        self._log_pending(logger)

    def close(self, state: State, logger: Logger) -> None:
        nvml, self._nvml, self._handle, self._pending = self._nvml, None, None, None
        if nvml is not None:
            nvml.nvmlShutdown()

    def _log(self, logger: Logger) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + 1.0
        metrics: dict[str, float] = {"cpu_percentage": psutil.cpu_percent()}
        network: Any = psutil.net_io_counters()
        for prefix, fields in (
            ("cpu_memory", psutil.virtual_memory()._asdict()),
            ("disk_memory", psutil.disk_usage(os.getcwd())._asdict()),
            ("network", {} if network is None else network._asdict()),  # None: the machine has no network
        ):
            metrics.update({f"{prefix}_{field}": value for field, value in fields.items()})
        logger.log_metrics(metrics)
        if self._nvml is not None and dist.get_world_size() == 1:
            logger.log_metrics(self._by_rank([_readings(self._nvml, self._handle)]))

    def _gather(self, state: State, logger: Logger) -> None:
        """Start to gather the readings of all ranks. Call it equally often on every rank."""
        if self._nvml is None or dist.get_world_size() == 1:
            return
        self._log_pending(logger)
        readings = _readings(self._nvml, self._handle)
        local = torch.tensor(readings, dtype=torch.float32).to(state.device._device, non_blocking=True)
        values = [DeferredValue.of_tensor(value) for value in torch.cat(dist.all_gather(local)).unbind()]
        DeferredValue.fetch(values)
        self._pending = values

    def _log_pending(self, logger: Logger) -> None:
        """Log the readings gathered a batch ago, which have arrived on the host by now."""
        if self._pending is not None:
            numbers, self._pending = [value.value for value in self._pending], None
            count = len(_GPU_KEYS)
            # With the current step, because some services do not accept earlier steps.
            logger.log_metrics(self._by_rank([numbers[i : i + count] for i in range(0, len(numbers), count)]))

    def _by_rank(self, readings: list[list[float]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for key, values in zip(_GPU_KEYS, zip(*readings, strict=True), strict=True):
            known = {rank: value for rank, value in enumerate(values) if not math.isnan(value)}
            if self.log_all_data:
                metrics.update({f"{key}_rank_{rank}": value for rank, value in known.items()})
            elif known:
                for name, choose in (("min", min), ("max", max)):
                    rank = choose(known, key=known.__getitem__)
                    metrics[f"{name}_{key}_rank_{rank}"] = known[rank]
        return metrics


def _nvml() -> Any:
    try:
        pynvml = import_module("pynvml")
    except ModuleNotFoundError as error:
        raise ImportError(
            "`SystemMetricsMonitor` needs NVML to monitor a GPU, which is not installed. "
            "Run `pip install 'composer-callbacks[gpu]'`."
        ) from error
    return pynvml


def _readings(nvml: Any, handle: Any) -> list[float]:
    """Read one value for each of `_GPU_KEYS`; NaN if the GPU does not support it."""

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:  # the GPU does not support it, or the user may not read it
            return None

    use = read(nvml.nvmlDeviceGetUtilizationRates)
    temperature = read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = read(nvml.nvmlDeviceGetPowerUsage)
    return [
        math.nan if use is None else float(use.gpu),
        math.nan if use is None else float(use.memory),
        math.nan if temperature is None else float(temperature),
        math.nan if milliwatts is None else milliwatts / 1000,
    ]
