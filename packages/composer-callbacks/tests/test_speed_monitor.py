from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.callbacks import speed_monitor
from composer.callbacks.speed_monitor import SpeedMonitor, _peak_flops
from composer.core import Engine, Precision, State, Timestamp
from composer.loggers import InMemoryLogger
from composer.testing import run_on_ranks


class Counting(torch.nn.Linear):
    """A model whose n-th batch takes 100 * n operations."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def flops_per_batch(self, batch: Any) -> int:
        return 100 * int(batch)


def drive(
    monitor: SpeedMonitor, model: torch.nn.Module, batches: int = 4, seconds: float = 2.0, tokens: int = 0
) -> tuple[Engine, InMemoryLogger]:
    """Batches of 8 samples that take some seconds each."""
    memory = InMemoryLogger()
    state = State(model, max_duration="9ba", dataloader=[0] * 9, callbacks=[monitor, memory])
    engine = Engine(state)
    engine.run_event("init")
    for number in range(1, batches + 1):
        state.batch = number
        state.timestamp = state.timestamp.to_next_batch(8, tokens, timedelta(seconds=seconds))
        engine.run_event("batch_end")
    return engine, memory


def series(memory: InMemoryLogger, key: str) -> list[float]:
    return [float(value) for _, value in memory.data[key]]


def test_throughput_is_measured_over_the_window() -> None:
    _, memory = drive(SpeedMonitor(window_size=2), torch.nn.Linear(1, 1), tokens=80)
    for start in ("throughput/", "throughput/device/"):
        assert series(memory, f"{start}batches_per_sec") == [0.5, 0.5]
        assert series(memory, f"{start}samples_per_sec") == [4.0, 4.0]
        assert series(memory, f"{start}tokens_per_sec") == [40.0, 40.0]
    assert not any("flops" in key or "mfu" in key for key in memory.data)


def test_the_first_batch_warms_up_and_does_not_count() -> None:
    monitor, memory = SpeedMonitor(window_size=1), InMemoryLogger()
    state = State(torch.nn.Linear(1, 1), max_duration="9ba", dataloader=[0], callbacks=[monitor, memory])
    engine = Engine(state)
    engine.run_event("init")
    for seconds in (1000, 2):
        state.timestamp = state.timestamp.to_next_batch(8, duration=timedelta(seconds=seconds))
        engine.run_event("batch_end")
    assert series(memory, "throughput/samples_per_sec") == [4.0]


def test_operations_and_their_part_of_the_peak_are_logged() -> None:
    _, memory = drive(SpeedMonitor(window_size=2, gpu_flops_available=1000), Counting())
    # Batches 2 and 3, then 3 and 4, in 4 seconds.
    assert series(memory, "throughput/flops_per_sec") == [125.0, 175.0]
    assert series(memory, "throughput/device/flops_per_sec") == [125.0, 175.0]
    assert series(memory, "throughput/device/mfu") == [0.125, 0.175]


def test_the_operations_are_those_of_a_model_that_an_algorithm_has_put_in() -> None:
    engine, memory = drive(SpeedMonitor(window_size=1), Counting(), batches=0)
    state = engine.state
    state.model = torch.nn.Linear(1, 1)  # at INIT algorithms come after callbacks
    engine.run_event("fit_start")
    for _ in range(2):
        state.timestamp = state.timestamp.to_next_batch(8, duration=timedelta(seconds=2))
        engine.run_event("batch_end")
    assert series(memory, "throughput/samples_per_sec") == [4.0]
    assert "throughput/flops_per_sec" not in memory.data


def test_without_a_known_peak_there_is_no_mfu() -> None:
    monitor = SpeedMonitor(window_size=1)
    _, memory = drive(monitor, Counting())
    assert monitor.gpu_flops_available == 0
    assert "throughput/device/flops_per_sec" in memory.data
    assert "throughput/device/mfu" not in memory.data


@pytest.mark.parametrize(("name", "found"), [("NVIDIA H100 80GB HBM3", 989.5e12), ("NVIDIA Unheard-of", 0.0)])
def test_the_peak_is_looked_up_on_gpus(monkeypatch: pytest.MonkeyPatch, name: str, found: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monitor = SpeedMonitor()
    state: Any = SimpleNamespace(
        model=Counting(), device=SimpleNamespace(name="gpu"), precision=Precision.AMP_BF16, timestamp=Timestamp()
    )
    if found:
        monitor.init(state, InMemoryLogger())  # type: ignore[arg-type]
    else:
        with pytest.warns(UserWarning, match="The peak of 'NVIDIA Unheard-of' in amp_bf16 is not known"):
            monitor.init(state, InMemoryLogger())  # type: ignore[arg-type]
    assert monitor.gpu_flops_available == found


@pytest.mark.parametrize(
    ("name", "precision", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "amp_bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A10", "amp_bf16", 125e12),
        ("NVIDIA A10G", "amp_bf16", 70e12),
        ("NVIDIA RTX A1000", "amp_bf16", 0),
        ("NVIDIA L40", "amp_bf16", 0),
        ("NVIDIA H100 PCIe", "amp_fp16", 756.5e12),
        ("NVIDIA H200", "amp_fp8", 1.979e15),
        ("Tesla V100-SXM2-16GB", "amp_fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "amp_bf16", 0),
        ("Tesla T4", "fp32", 8.1e12),
    ],
)
def test_peaks_are_found_by_name_and_precision(name: str, precision: str, flops: float) -> None:
    assert _peak_flops(name, Precision(precision)) == flops


def test_tf32_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert _peak_flops("NVIDIA A100-SXM4-80GB", Precision.FP32) == 156e12


def test_times_are_logged_in_the_unit_asked_for_and_evaluation_apart() -> None:
    engine, memory = drive(SpeedMonitor(time_unit="minutes"), torch.nn.Linear(1, 1), batches=1, seconds=60)
    state = engine.state
    state.eval_timestamp = Timestamp().to_next_batch(1, duration=timedelta(seconds=30))
    engine.run_event("eval_end")
    state.timestamp = state.timestamp.to_next_batch(8, duration=timedelta(seconds=60))
    engine.run_event("batch_end")
    assert series(memory, "time/train") == [1.0, 2.0]
    assert series(memory, "time/val") == [0.0, 0.5]
    assert series(memory, "time/total") == [1.0, 2.5]


def test_a_loop_without_durations_has_no_throughput() -> None:
    _, memory = drive(SpeedMonitor(window_size=1), torch.nn.Linear(1, 1), seconds=0)
    assert series(memory, "time/total") == [0.0] * 4
    assert not any(key.startswith("throughput/") for key in memory.data)


def test_a_run_with_the_trainer(run: Any) -> None:
    monitor = SpeedMonitor(window_size=2)
    done = run(
        monitor, max_duration="1ep", eval_dataloader=[next(iter([(torch.ones(2, 1, 1, 1), torch.zeros(2).long())]))]
    )
    done.fit()
    assert len(done.values("throughput/samples_per_sec")) == 4 - len(monitor.history_samples) + 1
    assert len(done.values("time/total")) == 4
    assert monitor.total_eval_wct > 0
    assert not done.keys("throughput/tokens")


def test_evaluation_time_survives_a_resume_and_the_window_begins_anew() -> None:
    monitor = SpeedMonitor(window_size=1)
    monitor.total_eval_wct = 12.0
    resumed = SpeedMonitor(window_size=1)
    for _ in range(2):  # the second run begins anew, too
        engine, _ = drive(resumed, torch.nn.Linear(1, 1), batches=1)
        engine.close()
        assert len(resumed.history_wct) == 1
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.total_eval_wct == 12.0
    assert not resumed.history_wct
    drive(resumed, torch.nn.Linear(1, 1), batches=1)
    assert resumed.total_eval_wct == 0.0


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_an_impossible_window_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match=r"`window_size` must be .*at least 1 batch"):
        SpeedMonitor(window_size=window)


def test_other_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`gpu_flops_available` must be positive, got 0"):
        SpeedMonitor(gpu_flops_available=0)
    with pytest.raises(ValueError, match="`time_unit` must be one of 'seconds'"):
        SpeedMonitor(time_unit="weeks")


def on_a_rank() -> dict[str, float]:
    _, memory = drive(SpeedMonitor(window_size=1, gpu_flops_available=1000), RankCounting(), batches=2)
    return {key: float(values[-1][1]) for key, values in memory.data.items()}


class RankCounting(Counting):
    def flops_per_batch(self, batch: Any) -> int:
        return 100 * (1 + torch.distributed.get_rank())


def test_two_ranks_share_the_work() -> None:
    first, second = run_on_ranks(on_a_rank)
    assert first == second
    assert (first["throughput/samples_per_sec"], first["throughput/device/samples_per_sec"]) == (4.0, 2.0)
    assert (first["throughput/flops_per_sec"], first["throughput/device/flops_per_sec"]) == (150.0, 75.0)
    assert first["throughput/device/mfu"] == pytest.approx(0.075)


def test_the_table_of_peaks_is_public() -> None:
    assert speed_monitor.GPU_AVAILABLE_FLOPS["a100"]["amp_bf16"] == 312e12


def test_a_number_of_operations_that_is_no_method_is_refused(run: Any, make_model: Any) -> None:
    model = make_model()
    model.flops_per_batch = 1e9
    with pytest.raises(TypeError, match=r"`flops_per_batch` of the model must be a method .* got float"):
        run(SpeedMonitor(), model=model)
