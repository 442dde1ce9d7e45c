"""Logs how busy the machine is: processors, memory, disk, network and GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
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
    the rank runs on. GPUs are asked through NVML, which needs the package `nvidia-ml-py`; what one does not tell, as
    some do not tell their power, is left out. With several ranks, the readings of all of them are exchanged on the
    device and logged one batch later, so that no step waits for them; of an evaluation or prediction, in which ranks
    may have different numbers of batches, those at its end.

    **Events** INIT, BATCH_START, EVAL_BATCH_START, PREDICT_BATCH_START; EVAL_END, FIT_END, EVAL_STANDALONE_END,
    PREDICT_END, CLOSE.
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
        self._sent: list[DeferredValue] | None = None  # the readings of all ranks in a row

    def init(self, state: State, logger: Logger) -> None:
        psutil.cpu_percent()  # the first reading has nothing to compare with
        self._sent = None
        if state.device.name == "gpu" and self._nvml is None:
            self._nvml = _nvml()
            self._nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(state.device._device).uuid
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

    def batch_start(self, state: State, logger: Logger) -> None:
        self._log(logger)
        self._exchange(state, logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self._log(logger)

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        self._log(logger)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._exchange(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def predict_end(self, state: State, logger: Logger) -> None:
        self._exchange(state, logger)
        self._receive(logger)

    def close(self, state: State, logger: Logger) -> None:
        nvml, self._nvml, self._handle, self._sent = self._nvml, None, None, None
        if nvml is not None:
            nvml.nvmlShutdown()

    def _log(self, logger: Logger) -> None:
        logger.log_metrics(_machine())
        if self._nvml is not None and dist.get_world_size() == 1:
            logger.log_metrics(self._by_rank([_readings(self._nvml, self._handle)]))

    def _exchange(self, state: State, logger: Logger) -> None:
        """Send readings to the other ranks. To be called on every rank as often as on the others."""
        if self._nvml is None or dist.get_world_size() == 1:
            return
        self._receive(logger)
        readings = _readings(self._nvml, self._handle)
        own = torch.tensor(readings, dtype=torch.float32).to(state.device._device, non_blocking=True)
        values = [DeferredValue.of_tensor(value) for value in torch.cat(dist.all_gather(own)).unbind()]
        DeferredValue.fetch(values)
        self._sent = values

    def _receive(self, logger: Logger) -> None:
        """Log what was sent a batch ago, which has arrived by now."""
        if self._sent is not None:
            numbers, self._sent = [value.value for value in self._sent], None
            count = len(_GPU_KEYS)
            # Under the step of now, because some services take no step that is over.
            logger.log_metrics(self._by_rank([numbers[i : i + count] for i in range(0, len(numbers), count)]))

    def _by_rank(self, readings: list[list[float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, values in zip(_GPU_KEYS, zip(*readings, strict=True), strict=True):
            told = {rank: value for rank, value in enumerate(values) if not math.isnan(value)}
            if self.log_all_data:
                found.update({f"{key}_rank_{rank}": value for rank, value in told.items()})
            elif told:
                for name, rank in (("min", min(told, key=told.__getitem__)), ("max", max(told, key=told.__getitem__))):
                    found[f"{name}_{key}_rank_{rank}"] = told[rank]
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
    """One number for each of `_GPU_KEYS`; NaN if the GPU does not tell."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # not supported, or not allowed here
            return None

    use = ask(nvml.nvmlDeviceGetUtilizationRates)
    temperature = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
    return [
        math.nan if use is None else float(use.gpu),
        math.nan if use is None else float(use.memory),
        math.nan if temperature is None else float(temperature),
        math.nan if milliwatts is None else milliwatts / 1000,
    ]
