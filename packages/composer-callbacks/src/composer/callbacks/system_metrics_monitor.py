"""Logs how busy the machine is: processors, memory, disk, network and GPUs."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, ClassVar

import psutil
import torch

from composer.callbacks._units import Declared
from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import dist

__all__ = ["SystemMetricsMonitor"]

_GPU_KEYS = ("gpu_percentage", "memory_percentage", "gpu_temperature_C", "gpu_power_usage_W")


class SystemMetricsMonitor(Callback):
    """Logs how busy this machine and its GPUs are, at the start of every batch.

    What is said of processors, memory, disk (that of the working directory) and network is of the whole machine that
    the rank runs on. GPUs are asked through NVML, which needs the package `nvidia-ml-py`; with several ranks, the
    readings of all of them are exchanged on the device and logged one batch later, under the step they were taken at,
    so that no step waits for them.

    **Events** INIT, BATCH_START, EVAL_BATCH_START, PREDICT_BATCH_START; FIT_END,
    EVAL_STANDALONE_END, PREDICT_END (what is still on its way), CLOSE.
    **Cost** some tenths of a millisecond of the host per batch; with several ranks on GPUs one small exchange.

    Args:
        log_all_data: Whether to log the GPU of every rank, not only the least and the most with their ranks.

    Raises:
        ImportError: The run is on a GPU, and `nvidia-ml-py` is not installed.

    Differs: the disk is that of the working directory; readings of other ranks are exchanged without waiting.
    """

    metrics: ClassVar[Declared] = {
        "cpu_percentage": ("%", "use of all processors since the last reading"),
        "cpu_memory_<field>": ("bytes; `percent` in %", "memory of the machine: the fields of `psutil.virtual_memory`"),
        "disk_memory_<field>": ("bytes; `percent` in %", "the disk: the fields of `psutil.disk_usage`"),
        "network_<field>": (
            "bytes, packets or errors, since the machine started",
            "the network: the fields of `psutil.net_io_counters`",
        ),
        "min_gpu_percentage_rank_<r>": ("%", "part of the time in which rank r's GPU was busy; also `max_...`"),
        "min_memory_percentage_rank_<r>": ("%", "part of the time in which its memory was accessed; also `max_...`"),
        "min_gpu_temperature_C_rank_<r>": ("degrees Celsius", "its temperature; also `max_...`"),
        "min_gpu_power_usage_W_rank_<r>": ("W", "its power; also `max_...`"),
        "<name>_rank_<r>": ("of the name", "the same four for every rank, without `min_`; with `log_all_data`"),
    }

    def __init__(self, log_all_data: bool = False) -> None:
        self.log_all_data = log_all_data
        self._nvml: Any = None
        self._handle: Any = None
        self._sent: tuple[int, list[DeferredValue]] | None = None  # step, and the readings of all ranks in a row

    def init(self, state: State, logger: Logger) -> None:
        psutil.cpu_percent()  # the first reading has nothing to compare with
        self._sent = None
        if state.device.name == "gpu" and self._nvml is None:
            self._nvml = _nvml()
            self._nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(state.device._device).uuid
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

    def batch_start(self, state: State, logger: Logger) -> None:
        self._log(state, logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self._log(state, logger)

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        self._log(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def predict_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def close(self, state: State, logger: Logger) -> None:
        nvml, self._nvml, self._handle, self._sent = self._nvml, None, None, None
        if nvml is not None:
            nvml.nvmlShutdown()

    def _log(self, state: State, logger: Logger) -> None:
        logger.log_metrics(_machine())
        if self._nvml is None:
            return
        readings = _readings(self._nvml, self._handle)
        if dist.get_world_size() == 1:
            logger.log_metrics(self._by_rank([readings]))
            return
        self._receive(logger)
        own = torch.tensor(readings, dtype=torch.float32).to(state.device._device, non_blocking=True)
        values = [DeferredValue.of_tensor(value) for value in torch.cat(dist.all_gather(own)).unbind()]
        DeferredValue.fetch(values)
        self._sent = (state.timestamp._batch, values)

    def _receive(self, logger: Logger) -> None:
        """Log what was sent a batch ago, which has arrived by now."""
        if self._sent is not None:
            step, values = self._sent
            self._sent = None
            numbers = [value.value for value in values]
            count = len(_GPU_KEYS)
            logger.log_metrics(self._by_rank([numbers[i : i + count] for i in range(0, len(numbers), count)]), step)

    def _by_rank(self, readings: list[list[float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, values in zip(_GPU_KEYS, zip(*readings, strict=True), strict=True):
            if self.log_all_data:
                found.update({f"{key}_rank_{rank}": value for rank, value in enumerate(values)})
            else:
                for name, best in (("min", min(values)), ("max", max(values))):
                    found[f"{name}_{key}_rank_{values.index(best)}"] = best
        return found


def _machine() -> dict[str, float]:
    found: dict[str, float] = {"cpu_percentage": psutil.cpu_percent()}
    network: Any = psutil.net_io_counters()
    for start, fields in (
        ("cpu_memory", psutil.virtual_memory()._asdict()),
        ("disk_memory", psutil.disk_usage(os.getcwd())._asdict()),
        ("network", {} if network is None else network._asdict()),  # None: the machine has none
    ):
        found.update({f"{start}_{field}": value for field, value in fields.items()})
    return found


def _nvml() -> Any:
    try:
        pynvml = import_module("pynvml")
    except ModuleNotFoundError as error:
        raise ImportError(
            "`SystemMetricsMonitor` needs NVML to watch a GPU, which is not installed. "
            "Run `pip install 'composer-callbacks[gpu]'`."
        ) from error
    return pynvml


def _readings(nvml: Any, handle: Any) -> list[float]:
    """One number for each of `_GPU_KEYS`."""
    use = nvml.nvmlDeviceGetUtilizationRates(handle)
    temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)
    return [float(use.gpu), float(use.memory), float(temperature), milliwatts / 1000]
