from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.callbacks import _metric_table
from composer.callbacks._metric_table import declared, metric_table, replaced
from composer.callbacks.activation_monitor import ActivationMonitor
from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.memory_monitor import MemoryMonitor
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.optim import DecoupledAdamW

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_says_what_the_callbacks_declare() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == replaced(text), "run `python -m composer.callbacks._metric_table README.md`"


def test_every_callback_is_in_the_readme() -> None:
    names = [point.name for point in _metric_table.distribution("composer-callbacks").entry_points]
    missing = [name for name in names if f"| `{name}(" not in README.read_text(encoding="utf-8")]
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
def test_what_is_logged_is_declared(run: Any, make_model: Any, make: Any) -> None:
    callback, model = make(), make_model()
    model.flops_per_batch = lambda batch: 1
    done = run(callback, model=model, optimizers=DecoupledAdamW(model.parameters()))
    done.fit()
    foreign = ("time/epoch", "time/batch", "time/sample", "loss/", "metrics/", "trainer/")
    logged = {key for key in done.memory.data if not key.startswith(foreign)}
    # Inputs stand for outputs, too, the least for the most.
    logged = {key.replace("_output", "_input").replace("max_", "min_") for key in logged}
    patterns = [pattern(key) for key in callback.metrics]

    assert logged
    assert not [key for key in logged if not any(p.fullmatch(key) for p in patterns)]
    known = [key for key in callback.metrics if "gpu" not in key and "rank" not in key and "token" not in key]
    assert not [key for key in known if not any(pattern(key).fullmatch(name) for name in logged)]


def test_the_memory_monitor_declares_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer.callbacks.memory_monitor import _get_memory_report

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    reported = {f"memory/{name}" for name in _get_memory_report()}
    assert reported == {key for key in MemoryMonitor.metrics if "<" not in key}


def test_every_key_has_a_unit_and_a_meaning() -> None:
    rows = [row for _, metrics in declared() for row in metrics.values()]
    assert len(rows) > 30
    assert all(unit and meaning for unit, meaning in rows)
    assert not any("|" in text for row in rows for text in row)
    assert metric_table().count("\n") == len(rows) + 1


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="`text` must have the lines"):
        replaced("nothing")


def test_the_script_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "README.md"
    file.write_text(README.read_text().replace("learning rate of parameter group", "something else"))
    monkeypatch.setattr(sys, "argv", ["table", str(file), "--check"])
    with pytest.raises(SystemExit, match="is not what the callbacks declare"):
        _metric_table.main()
    monkeypatch.setattr(sys, "argv", ["table", str(file)])
    _metric_table.main()
    assert file.read_text() == README.read_text()
