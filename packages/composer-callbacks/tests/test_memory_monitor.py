from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.callbacks.memory_monitor import MemoryMonitor, _get_memory_report
from composer.core import Timestamp
from composer.testing import run_on_ranks

STATS = {
    "allocated_bytes.all.current": 1_234_567_890,
    "active_bytes.all.current": 2_000_000_000,
    "inactive_split_bytes.all.current": 0,
    "reserved_bytes.all.current": 3_000_000_000,
    "allocated_bytes.all.peak": 12_345_678_901,
    "active_bytes.all.peak": 5_000_000_000,
    "inactive_split_bytes.all.peak": 6_000_000_000,
    "reserved_bytes.all.peak": 7_000_000_000,
    "num_alloc_retries": 3,
    "num_ooms": 1,
}


def nested(stats: dict[str, int]) -> dict[str, Any]:
    """As `torch.cuda.memory_stats_as_nested_dict` gives them."""
    found: dict[str, Any] = {}
    for key, value in stats.items():
        *outer, last = key.split(".")
        inner = found
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def gpu(batch: int = 0) -> Any:
    """A state that says its device is a GPU, with tensors on the CPU."""
    device = SimpleNamespace(name="gpu", _device=torch.device("cpu"))
    return SimpleNamespace(device=device, timestamp=Timestamp(batch=batch))


class Log:
    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        self.data |= metrics


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    stats = dict(STATS)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: nested(stats))
    return stats


def test_bytes_are_gigabytes_with_five_digits_and_counts_are_counts(stats: dict[str, int]) -> None:
    log: Any = Log()
    MemoryMonitor().after_train_batch(gpu(), log)
    assert log.data == {
        "memory/current_allocated_mem": 1.2346,
        "memory/current_active_mem": 2.0,
        "memory/current_inactive_mem": 0.0,
        "memory/current_reserved_mem": 3.0,
        "memory/peak_allocated_mem": 12.346,
        "memory/peak_active_mem": 5.0,
        "memory/peak_inactive_mem": 6.0,
        "memory/peak_reserved_mem": 7.0,
        "memory/alloc_retries": 3,
    }


def test_other_keys_may_be_chosen(stats: dict[str, int]) -> None:
    assert _get_memory_report({"num_ooms": "ooms"}) == {"ooms": 1}
    stats.clear()  # as before the first allocation
    assert _get_memory_report({"num_ooms": "ooms"}) == {"ooms": 0}


@pytest.mark.parametrize("key", ["nothing", "allocated_bytes.all", "allocated_bytes.all.current.more"])
def test_a_key_that_torch_does_not_know_is_refused(stats: dict[str, int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"keys of `torch.cuda.memory_stats`, got '{key}'. Known: allocated_bytes"):
        _get_memory_report({key: "x"})


@pytest.mark.parametrize("interval", [0, 1.5, True])
def test_an_impossible_interval_is_refused(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"`dist_aggregate_batch_interval` must be .*at least 1 batch"):
        MemoryMonitor(dist_aggregate_batch_interval=interval)


def test_without_cuda_it_warns_and_logs_nothing(run: Any) -> None:
    with pytest.warns(UserWarning, match="`MemoryMonitor` only works on CUDA devices"):
        begun = run(MemoryMonitor(dist_aggregate_batch_interval=1))
    assert not begun.fit().keys("memory/")


def on_a_rank() -> tuple[dict[str, float], set[str]]:
    rank = torch.distributed.get_rank()
    torch.cuda.memory_stats_as_nested_dict = lambda: {"num_alloc_retries": 10 * rank}  # type: ignore[assignment]
    log, monitor = Log(), MemoryMonitor({"num_alloc_retries": "retries"}, dist_aggregate_batch_interval=2)
    monitor.after_train_batch(gpu(1), log)  # type: ignore[arg-type]
    before = set(log.data)
    monitor.after_train_batch(gpu(2), log)  # type: ignore[arg-type]
    return {key: float(value) for key, value in log.data.items()}, before


def test_ranks_are_put_together_at_the_interval() -> None:
    for rank, (logged, before) in enumerate(run_on_ranks(on_a_rank)):
        assert before == {"memory/retries"}
        assert logged == {
            "memory/retries": 10 * rank,
            "memory/retries_avg": 5.0,
            "memory/retries_min": 0.0,
            "memory/retries_max": 10.0,
        }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_watched(run: Any) -> None:
    done = run(MemoryMonitor(dist_aggregate_batch_interval=1), device="gpu").fit()
    assert len(done.values("memory/peak_allocated_mem")) == 8
    assert float(done.values("memory/peak_allocated_mem_max")[-1]) > 0
