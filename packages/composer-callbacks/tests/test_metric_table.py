"""The table in the README has every key that callbacks log."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.callbacks.activation_monitor import ActivationMonitor
from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.memory_monitor import _get_memory_report
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.optim import DecoupledAdamW

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NAMES = [point.name for point in distribution("composer-callbacks").entry_points]


def documented(callback: str) -> list[str]:
    """The keys that the table gives for a callback; `<...>` in a key is a placeholder."""
    return re.findall(rf"^\| `([^`|]+)` \| [^|]+ \| [^|]+ \| `{callback}` \|$", README, re.MULTILINE)


def test_every_row_of_the_table_has_a_key_a_unit_a_meaning_and_a_callback() -> None:
    _, _, table = README.partition("| key | unit | meaning | callback |\n|---|---|---|---|\n")
    rows, _, _ = table.partition("\n\n")
    keys = [key for name in NAMES for key in documented(name)]
    assert len(keys) == len(set(keys)) == len(rows.splitlines()) > 30


def test_every_callback_is_in_the_readme() -> None:
    missing = [name for name in NAMES if f"| `{name}(" not in README]
    assert not missing


def pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.sub("<[^>]*>", ".*", re.escape(key).replace(r"\<", "<").replace(r"\>", ">")))


@pytest.mark.parametrize(
    "make",
    [
        LRMonitor,
        lambda: OptimizerMonitor(batch_log_interval=1),
        lambda: ActivationMonitor("1ep"),
        RuntimeEstimator,
        lambda: SpeedMonitor(window_size=1, gpu_flops_available=1),
        SystemMetricsMonitor,
    ],
)
def test_logged_keys_are_in_the_table(run: Any, make_model: Any, make: Any) -> None:
    callback, model = make(), make_model()
    model.flops_per_batch = lambda batch: 1
    done = run(callback, model=model, optimizers=DecoupledAdamW(model.parameters()))
    done.fit()
    foreign = ("time/epoch", "time/batch", "time/sample", "loss/", "metrics/", "trainer/")
    logged = {key for key in done.memory.data if not key.startswith(foreign)}
    # Inputs stand for outputs, too, the least for the most.
    logged = {key.replace("_output", "_input").replace("max_", "min_") for key in logged}
    keys = documented(type(callback).__name__)
    patterns = [pattern(key) for key in keys]

    assert logged
    assert not [key for key in logged if not any(p.fullmatch(key) for p in patterns)]
    known = [key for key in keys if "gpu" not in key and "rank" not in key and "token" not in key]
    assert not [key for key in known if not any(pattern(key).fullmatch(name) for name in logged)]


def test_the_keys_of_the_memory_monitor_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    reported = {f"memory/{name}" for name in _get_memory_report()}
    assert reported == {key for key in documented("MemoryMonitor") if "<" not in key}
