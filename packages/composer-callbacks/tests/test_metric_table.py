"""The table of everything that callbacks log is in the README.

python packages/composer-callbacks/tests/test_metric_table.py packages/composer-callbacks/README.md [--check]

writes the table between the markers, or checks it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.callbacks._units import Declared
from composer.callbacks.activation_monitor import ActivationMonitor
from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.memory_monitor import MemoryMonitor
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.optim import DecoupledAdamW

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- metrics: written by tests/test_metric_table.py -->", "<!-- end of metrics -->"


def declared(name: str = "composer-callbacks") -> Iterator[tuple[str, Declared]]:
    """The callbacks of a distribution that declare what they log, by name, with what they declare.

    Args:
        name: The distribution.
    """
    points: list[EntryPoint] = [p for p in distribution(name).entry_points if p.group == "composer.callbacks"]
    for point in sorted(points, key=lambda point: point.name):
        metrics: Declared | None = getattr(point.load(), "metrics", None)
        if metrics is not None:
            yield point.name, metrics


def metric_table() -> str:
    """The table, in Markdown."""
    lines = ["| key | unit | meaning | callback |", "|---|---|---|---|"]
    for name, metrics in declared():
        lines += [f"| `{key}` | {unit} | {meaning} | `{name}` |" for key, (unit, meaning) in metrics.items()]
    return "\n".join(lines)


def replaced(text: str) -> str:
    """A text with the table as it is now between its markers.

    Args:
        text: What has been written.

    Raises:
        ValueError: The markers are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"`text` must have the lines {BEGIN!r} and {END!r}, between which the table goes. Add them.")
    return f"{before}{BEGIN}\n\n{metric_table()}\n\n{END}{after}"


def main() -> None:
    """Write or check a file."""
    parser = argparse.ArgumentParser(description="Write the table of everything that callbacks log.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is not up to date")
    given = parser.parse_args()
    old = given.file.read_text(encoding="utf-8")
    new = replaced(old)
    if new != old and given.check:
        sys.exit(f"The table in {given.file} is not what the callbacks declare. Run this without `--check`.")
    if new != old:
        given.file.write_text(new, encoding="utf-8")


def test_the_readme_has_the_table_of_declared_metrics() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == replaced(text), "run this file with the path of the README"


def test_every_callback_is_in_the_readme() -> None:
    names = [point.name for point in distribution("composer-callbacks").entry_points]
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
def test_logged_metrics_are_declared(run: Any, make_model: Any, make: Any) -> None:
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
        main()
    monkeypatch.setattr(sys, "argv", ["table", str(file)])
    main()
    assert file.read_text() == README.read_text()


if __name__ == "__main__":
    main()
