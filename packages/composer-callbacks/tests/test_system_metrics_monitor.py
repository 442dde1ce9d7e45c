from __future__ import annotations

import itertools
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from composer.callbacks import system_metrics_monitor
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.core import Timestamp
from composer.testing import run_on_ranks


class Nvml:
    """Fake NVML on a machine whose n-th GPU is n times as busy as the first."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = OSError

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.calls, self.tells_power = rank, Counter[str](), True

    def nvmlInit(self) -> None:
        self.calls["init"] += 1

    def nvmlShutdown(self) -> None:
        self.calls["shutdown"] += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return uuid.decode()

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "GPU-1234"
        return SimpleNamespace(gpu=10 * (self.rank + 1), memory=20)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 50 - self.rank

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.tells_power:
            raise self.NVMLError("not supported")
        return 123_456


class Log:
    def __init__(self) -> None:
        self.data: dict[str, list[Any]] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for key, value in metrics.items():
            self.data.setdefault(key, []).append((step, value))


def gpu(batch: int = 0) -> Any:
    """A state that says its device is a GPU, with tensors on the CPU."""
    device = SimpleNamespace(name="gpu", _device=torch.device("cpu"))
    return SimpleNamespace(device=device, timestamp=Timestamp(batch=batch))


def begun(log_all_data: bool = False, rank: int = 0) -> tuple[SystemMetricsMonitor, Any, Nvml]:
    nvml: Any = Nvml(rank)
    sys.modules["pynvml"] = nvml
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="1234")  # type: ignore[assignment]
    monitor, log = SystemMetricsMonitor(log_all_data), Log()
    monitor.init(gpu(), log)  # type: ignore[arg-type]
    return monitor, log, nvml


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # both are put back after the test
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)


def test_the_machine_is_watched_in_training_evaluation_and_prediction(
    run: Any, make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(system_metrics_monitor, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    done = run(SystemMetricsMonitor(), max_duration="1ep", eval_dataloader=make_loader())
    done.fit()
    assert len(done.values("cpu_percentage")) == 4 + 4
    done.trainer.predict(make_loader(4))
    assert len(done.values("cpu_percentage")) == 4 + 4 + 2
    for start, fields in (
        ("cpu_memory", psutil.virtual_memory()._fields),
        ("disk_memory", psutil.disk_usage("/")._fields),
        ("network", getattr(psutil.net_io_counters(), "_fields", ())),
    ):
        assert done.keys(start) == {f"{start}_{field}" for field in fields}
    assert done.values("cpu_memory_total")[0] == psutil.virtual_memory().total
    assert not any("gpu" in key for key in done.memory.data)


def test_the_machine_is_read_once_a_second(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.3)
    monkeypatch.setattr(system_metrics_monitor, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    done = run(SystemMetricsMonitor(), max_duration="9ba").fit()
    assert [0, 4, 8] == [int(stamp.batch) for stamp, _ in done.memory.data["cpu_percentage"]]


def test_a_machine_without_a_network_is_no_problem(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    assert not run(SystemMetricsMonitor(), max_duration="1ba").fit().keys("network")


def test_a_single_gpu_is_the_least_and_the_most(machine: None) -> None:
    monitor, log, nvml = begun()
    monitor.batch_start(gpu(), log)
    for name, value in (
        ("gpu_percentage", 10.0),
        ("memory_percentage", 20.0),
        ("gpu_temperature_C", 50.0),
        ("gpu_power_usage_W", 123.456),
    ):
        assert log.data[f"min_{name}_rank_0"] == log.data[f"max_{name}_rank_0"] == [(None, value)]
    monitor.fit_end(gpu(), log)
    for _ in range(2):
        monitor.close(gpu(), log)
    assert nvml.calls == {"init": 1, "shutdown": 1}


def test_all_gpus_can_be_logged(machine: None) -> None:
    monitor, log, _ = begun(log_all_data=True)
    monitor.batch_start(gpu(), log)
    assert log.data["gpu_percentage_rank_0"] == [(None, 10.0)]
    assert not any(key.startswith(("min_", "max_")) for key in log.data)


@pytest.mark.parametrize("log_all_data", [False, True])
def test_what_a_gpu_does_not_tell_is_left_out(machine: None, log_all_data: bool) -> None:
    monitor, log, nvml = begun(log_all_data)
    nvml.tells_power = False
    monitor.batch_start(gpu(), log)
    assert any("gpu_temperature_C" in key for key in log.data)
    assert not any("power" in key for key in log.data)


def test_without_nvml_a_gpu_is_refused(machine: None) -> None:
    with pytest.raises(ImportError, match=r"Run `pip install 'composer-callbacks\[gpu\]'`"):
        SystemMetricsMonitor().init(gpu(), Log())  # type: ignore[arg-type]


def on_a_rank(log_all_data: bool) -> tuple[dict[str, Any], bool]:
    monitor, log, _ = begun(log_all_data, torch.distributed.get_rank())
    monitor.batch_start(gpu(7), log)
    waited = not any("rank" in key for key in log.data)
    monitor.batch_start(gpu(8), log)
    monitor.fit_end(gpu(9), log)
    return {key: values for key, values in log.data.items() if "rank" in key}, waited


@pytest.mark.parametrize("log_all_data", [False, True])
def test_readings_of_all_ranks_are_logged_a_batch_later(log_all_data: bool) -> None:
    for logged, waited in run_on_ranks(on_a_rank, 2, log_all_data):
        assert waited
        # Under the step of then: W&B takes no step that is over.
        if log_all_data:
            assert logged["gpu_percentage_rank_0"] == [(None, 10.0), (None, 10.0)]
            assert logged["gpu_percentage_rank_1"] == [(None, 20.0), (None, 20.0)]
        else:
            assert logged["min_gpu_percentage_rank_0"] == [(None, 10.0), (None, 10.0)]
            assert logged["max_gpu_percentage_rank_1"] == [(None, 20.0), (None, 20.0)]
            assert logged["min_gpu_temperature_C_rank_1"] == [(None, 49.0), (None, 49.0)]


def with_another_number_of_batches() -> tuple[list[Any], list[Any], int]:
    rank = torch.distributed.get_rank()
    monitor, log, _ = begun(log_all_data=True, rank=rank)
    for _ in range(rank):
        monitor.eval_batch_start(gpu(), log)
    monitor.eval_end(gpu(), log)
    monitor.eval_standalone_end(gpu(), log)
    evaluated = list(log.data["gpu_percentage_rank_1"])
    for _ in range(3 * rank):
        monitor.predict_batch_start(gpu(), log)
    monitor.predict_end(gpu(), log)
    total = torch.tensor(rank)
    torch.distributed.all_reduce(total)  # nothing else is in flight
    return evaluated, log.data["gpu_percentage_rank_1"], int(total)


def test_ranks_may_have_different_numbers_of_batches_to_evaluate() -> None:
    for evaluated, both, total in run_on_ranks(with_another_number_of_batches, 2):
        assert evaluated == [(None, 20.0)]
        assert both == [(None, 20.0)] * 2
        assert total == 1
