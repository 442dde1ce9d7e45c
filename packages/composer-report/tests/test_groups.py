from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer.report import Run, Series
from composer.report._charts import epochs_at, mean_line
from composer.report._groups import Group, families, group_runs, less_is_better, results, show_group
from composer.report._html import Html, count, duration, el, json_script, number, size, text


def run_with(values: list[float], name: str = "metrics/eval/Accuracy", steps: Any = None, **fields: Any) -> Run:
    steps = np.arange(len(values)) if steps is None else np.array(steps)
    series = Series(name, steps, steps / 2, steps * 0, np.array(values, dtype=float))
    return Run(**{"folder": Path("a"), "name": "a", **fields}, metrics={name: series})


def test_runs_of_a_group_are_shown_together_and_others_separately() -> None:
    runs = [
        Run(Path("x/1"), "one", "g"),
        Run(Path("x/2"), "same"),
        Run(Path("x/3"), "three", "g"),
        Run(Path("x/4"), "same"),
    ]

    assert [(group.name, len(group.runs)) for group in group_runs(runs)] == [("g", 2), ("same (2)", 1), ("same (4)", 1)]


def test_the_result_of_a_group_is_mean_and_sample_deviation() -> None:
    group = Group("g", (run_with([0.1, 0.9, 0.8]), run_with([0.2, 0.6])))
    result = results(group, "metrics/eval/Accuracy")

    assert result is not None
    assert (result.mean, result.count, result.best, result.best_step) == (pytest.approx(0.7), 2, 0.9, 1)
    assert result.spread == pytest.approx(np.std([0.8, 0.6], ddof=1))
    assert show_group(result) == "0.7000 \u00b1 0.1414"
    assert results(group, "other") is None
    assert show_group(None) == ""


def test_nan_makes_no_result_and_no_best() -> None:
    result = results(Group("g", (run_with([math.nan, math.nan]),)), "metrics/eval/Accuracy")

    assert result is not None
    assert math.isnan(result.mean)
    assert math.isnan(result.best)
    assert show_group(result) == "NaN"


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("loss/train/total", True),
        ("metrics/eval/CrossEntropy", True),
        ("metrics/eval/LanguagePerplexity", True),
        ("metrics/eval/MulticlassAccuracy", False),
        ("metrics/eval/MIoU", False),
    ],
)
def test_which_way_is_better(name: str, less: bool) -> None:
    assert less_is_better(name) == less


def test_a_group_is_drawn_as_its_mean_with_its_spread_and_its_runs() -> None:
    lines = mean_line(Group("g", (run_with([1.0, 2.0]), run_with([3.0, 6.0]))), "metrics/eval/Accuracy", 1)

    assert [line.faint for line in lines] == [True, True, False]
    assert lines[-1].series.values.tolist() == [2.0, 4.0]
    assert lines[-1].spread is not None
    np.testing.assert_allclose(lines[-1].spread, [[2 - 2**0.5, 4 - 8**0.5], [2 + 2**0.5, 4 + 8**0.5]])


def test_runs_that_were_measured_at_other_times_are_not_averaged() -> None:
    group = Group("g", (run_with([1.0, 2.0]), run_with([3.0, 6.0], steps=[0, 5])))

    assert [line.faint for line in mean_line(group, "metrics/eval/Accuracy", 0)] == [False, False]


def test_epochs_have_fractions() -> None:
    run = Run(Path("a"), "a", epoch_starts=[(0, 0), (1, 10), (2, 20)], epoch_batches=10)

    assert epochs_at(run, np.array([0, 5, 10, 15, 25, 30])).tolist() == [0, 0.5, 1, 1.5, 2.5, 3]  # type: ignore[union-attr]
    assert epochs_at(Run(Path("a"), "a"), np.array([0])) is None


def test_metrics_find_their_sections() -> None:
    names = """loss/train/total loss/train/aux metrics/train/Accuracy metrics/eval/Accuracy metrics/other/Accuracy
    lr-SGD/group0 throughput/samples_per_sec throughput/device/samples_per_sec time/train time/total
    time/remaining_estimate time/batch time/epoch trainer/device_train_microbatch_size memory/peak_allocated_mem
    memory/current_allocated_mem cpu_percentage gpu_power_usage_W_rank_0 l2_norm/grad/a l2_norm/grad/b mine""".split()
    found = [(family.section, family.title, sorted(family.members.values())) for family in families(names)]

    assert found == [
        ("learning", "Loss", ["train"]),
        ("learning", "Aux", ["train"]),
        ("learning", "Accuracy", ["eval", "other", "train"]),
        ("rate", "Learning rate", ["SGD/group0"]),
        ("speed", "Remaining time", ["remaining_estimate"]),
        ("speed", "Samples per second", ["all devices", "per device"]),
        ("speed", "Time spent", ["total", "train"]),
        ("machine", "Cpu percentage", ["cpu_percentage"]),
        ("machine", "Gpu power", ["gpu_power_usage_W_rank_0"]),
        ("machine", "Memory current", ["current_allocated_mem"]),
        ("machine", "Memory peak", ["peak_allocated_mem"]),
        ("other", "l2_norm/grad", ["a", "b"]),
        ("other", "mine", ["mine"]),
    ]


def test_everything_is_escaped() -> None:
    assert el("p", "<b>", class_='"x"') == '<p class="&quot;x&quot;">&lt;b&gt;</p>'
    assert text(["a", Html("<i>"), None, ["&"]]) == "a<i>&amp;"
    assert el("br") == "<br>"
    assert el("p", "\x00\ud800") == "<p>??</p>"
    assert "</script><" not in json_script({"a": "</script><!--"}, "x").removesuffix("</script>")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.0, "3"), (1234567.0, "1,234,567"), (0.12345678, "0.1235"), (1e-7, "1e-07"), (12345.6, "12,346"),
        (math.nan, "NaN"), (-math.inf, "-inf"), (None, ""), (0.0, "0"), (2.5e12, "2.5e+12"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_amounts() -> None:
    assert [duration(s) for s in (0.04, 59.4, 61, 3700, 200_000)] == [
        "0.0 s", "59 s", "1 min 1 s", "1 h 1 min", "2 d 7 h",
    ]  # fmt: skip
    assert [size(n) for n in (12, 1200, 3_456_789, 2e12)] == ["12 B", "1.2 kB", "3.46 MB", "2 TB"]  # type: ignore[arg-type]
    assert [count(n, w) for n, w in ((59, "property"), (1, "property"), (2, "day"))] == [
        "59 properties",
        "1 property",
        "2 days",
    ]
    assert [count(n, w) for n, w in ((1, "batch"), (2, "batch"), (3, "epoch"))] == ["1 batch", "2 batches", "3 epochs"]
