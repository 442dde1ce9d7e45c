"""The text of the bars, on real streams."""

from __future__ import annotations

import io
import os
import re
import struct
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tqdm.auto

from composer.loggers import DeferredValue
from composer.loggers.progress_bar_logger import Bar, ProgressBarLogger, _short_names


def shown(terminal: io.StringIO) -> list[str]:
    """Return the successive texts of the line."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", terminal.getvalue()) if line.strip()]


def test_a_finished_bar_shows_progress_time_rate_and_loss(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace
) -> None:
    run = start(ProgressBarLogger(terminal), "1ep", 4)
    run.fit(stop_after=2)
    clock.now += 4
    for _ in range(2):
        run.train_batch()
    run.engine.run_event("epoch_end")

    bar = "\u2588" * 10
    assert f"train epoch 1    100%|{bar}| 4/4 [00:04<00:00,  1.00ba/s, loss=4]" == shown(terminal)[-1]
    assert terminal.getvalue().endswith("\n")


def test_a_bar_is_redrawn_by_the_clock_not_by_the_step(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace
) -> None:
    run = start(ProgressBarLogger(terminal), "1000ba", 10)
    run.fit(stop_after=1)
    before = terminal.getvalue()
    for _ in range(50):
        run.train_batch()

    assert before == terminal.getvalue()

    clock.now += 0.11
    run.train_batch()

    assert "| 52/1000 [" in shown(terminal)[-1]
    assert "loss=52]" in shown(terminal)[-1]


def test_losses_are_read_only_when_the_bar_is_redrawn(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace
) -> None:
    run = start(ProgressBarLogger(terminal), "1000ba", 10)
    run.fit(stop_after=1)
    losses = [DeferredValue.of_tensor(torch.tensor(float(i))) for i in range(3)]
    for i, loss in enumerate(losses):
        run.logger.log_metrics({"loss/train/total": loss})
        clock.now += 0.11 * (i == 1)
        run.state.timestamp = run.state.timestamp.to_next_batch()
        run.engine.run_event("batch_end")

    assert [repr(loss) for loss in losses] == [
        "DeferredValue(<not read>)",
        "DeferredValue(1.0)",
        "DeferredValue(<not read>)",
    ]


def test_a_value_on_its_way_is_shown_when_it_arrives(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the copy is not there at once, and the step must not wait for it."""
    run = start(ProgressBarLogger(terminal), "1000ba", 10)
    run.fit(stop_after=1)
    arrived = False
    fetched: list[DeferredValue] = []
    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: arrived))
    monkeypatch.setattr(DeferredValue, "fetch", fetched.extend)

    clock.now += 0.11
    run.train_batch()
    run.train_batch()
    waiting = shown(terminal)[-1]
    arrived = True
    run.train_batch()
    arrived = False
    clock.now += 0.11
    run.train_batch()

    assert "| 2/1000 [" in waiting  # the step itself is shown without delay
    assert "loss=1]" in waiting
    assert "| 5/1000 [" in shown(terminal)[-1]
    assert "loss=2]" in shown(terminal)[-1]
    assert fetched[0].value == 2.0


def test_the_bar_of_a_run_of_seconds_shows_their_part_and_no_rate(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace
) -> None:
    start(ProgressBarLogger(terminal), "2sec", 3).fit()
    last = shown(terminal)[-1]

    assert last.startswith("train            100%|")
    assert "| 2/2 [00:00<" in last
    assert ", loss=4]" in last
    assert "/s" not in last


def test_the_training_metrics_are_never_computed_for_the_bar(start: Any, terminal: io.StringIO) -> None:
    run = start(ProgressBarLogger(terminal), "2ep", 5)
    run.fit()

    assert run.computed == 0


def test_the_bar_of_an_evaluation_shows_its_results(start: Any, terminal: io.StringIO) -> None:
    run = start(ProgressBarLogger(terminal), "4ba", 4, eval_every=2, eval_label="gsm8k")
    run.fit()
    results = [line for line in shown(terminal) if "accuracy=0.75]" in line]

    assert [line[:15] for line in results] == ["gsm8k batch 2  ", "gsm8k batch 4  "]
    assert all("| 3/3 [" in line for line in results)


def test_an_evaluation_does_not_count_into_the_rate_of_the_training(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace
) -> None:
    run = start(ProgressBarLogger(terminal), "100ba", 100)
    run.fit(stop_after=1)
    clock.now += 5
    run.train_batch()
    run.engine.run_event("eval_start")
    clock.now += 3600
    run.engine.run_event("eval_end")
    clock.now += 5
    run.train_batch()

    assert "3/100 [00:10<" in shown(terminal)[-1]


def test_a_run_without_a_known_length_shows_no_time_left(start: Any, terminal: io.StringIO) -> None:
    run = start(ProgressBarLogger(terminal), "1ep", None)
    run.fit(stop_after=3)
    run.engine.run_event("epoch_end")

    assert re.fullmatch(r"train epoch 1\s+3 \[00:00, .*ba/s, loss=3\]", shown(terminal)[-1])


def test_a_last_batch_that_reaches_past_the_end_completes_the_bar(start: Any, terminal: io.StringIO) -> None:
    start(ProgressBarLogger(terminal), "5sp", 10).fit()

    assert "train            100%|" in shown(terminal)[-1]
    assert "| 6/6 [" in shown(terminal)[-1]


def test_a_label_with_braces_is_no_format(start: Any, terminal: io.StringIO) -> None:
    run = start(ProgressBarLogger(terminal), eval_label="{eval}")
    run.evaluate()

    assert shown(terminal)[-1].startswith("{eval}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), "0.5"),
        (torch.tensor(7), "7"),
        (DeferredValue(lambda: torch.tensor(1e-7)), "1e-07"),
        (123456.0, "1.235e+05"),
        (3, "3"),
        ("text", '"text"'),
    ],
)
def test_any_value_can_be_shown(terminal: io.StringIO, value: Any, expected: str) -> None:
    bar = Bar(10, "{n_fmt}{postfix}", "batch", ["loss"])
    bar.show(terminal)
    bar.log({"loss": value, "lr": 1})
    if isinstance(value, torch.Tensor):
        value += 1  # must not show
    bar.close()

    assert f"0, loss={expected}" == shown(terminal)[-1]


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 2), np.zeros(2), [torch.zeros(2)], DeferredValue(lambda: torch.eye(2))]
)
def test_arrays_are_not_in_the_line(terminal: io.StringIO, value: Any) -> None:
    bar = Bar(10, "{n_fmt}{postfix}", "batch", ["loss"])
    bar.show(terminal)
    bar.log({"loss": 0.5, "loss/array": value})
    bar.close()

    assert "0, loss=0.5" == shown(terminal)[-1]


def test_a_log_file_gets_one_plain_line_per_bar(start: Any) -> None:
    stream = io.StringIO()
    start(ProgressBarLogger(stream), "2ep", 50, eval_every=25, eval_batches=4).fit()
    lines = stream.getvalue().splitlines()

    assert len(lines) == 2 + 4
    assert re.fullmatch(r"eval  epoch 1    100% 4/4 \[00:00<00:00, .*ba/s, accuracy=0.75\]", lines[0])
    assert re.fullmatch(r"train epoch 1    100% 50/50 \[00:0\d<00:00, .*ba/s, loss=50\]", lines[2])
    assert "\r" not in stream.getvalue()


def test_a_log_file_gets_a_line_every_half_minute(start: Any, clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream), "1000ba", 10)
    run.fit(stop_after=1)
    for _ in range(99):
        clock.now += 1
        run.train_batch()
    lines = stream.getvalue().splitlines()

    assert [int(re.search(r"(\d+)/1000", line).group(1)) - 1 for line in lines] == [30, 60, 90]  # type: ignore[union-attr]
    assert lines[0].endswith("loss=31]")


def _everything(master: int) -> str:
    """Return the text that was written to a terminal that is closed now; it may arrive in parts."""
    parts: list[bytes] = []
    with suppress(OSError):  # how Linux tells the end
        while part := os.read(master, 65536):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize("columns", [31, 80, 200])
def test_a_terminal_of_any_width_is_enough(start: Any, columns: int) -> None:
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        start(ProgressBarLogger(terminal), "1ep", 2).fit()
    lines = shown(io.StringIO(_everything(master)))
    os.close(master)

    assert max(len(line) for line in lines) <= columns
    assert (columns > 70) == lines[-1].endswith("loss=2]")


def test_tqdm_can_be_switched_off(start: Any, terminal: io.StringIO) -> None:
    class Disabled(tqdm.std.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.auto, "tqdm", Disabled)
        start(ProgressBarLogger(terminal), "2ep", 5, eval_every=5).fit()

    assert "%" not in terminal.getvalue()


@pytest.mark.parametrize("log_traces", [True, False])
def test_traces_are_printed_on_demand_above_the_bar(start: Any, terminal: io.StringIO, log_traces: bool) -> None:
    run = start(ProgressBarLogger(terminal, log_traces), "5ba", 5)
    run.fit(stop_after=1)
    run.logger.log_traces({"algorithm_traces/MixUp/Event.INIT": 1})

    assert log_traces == terminal.getvalue().endswith("\r[trace]: algorithm_traces/MixUp/Event.INIT:1\n")
    assert log_traces == ("trace" in terminal.getvalue())


def test_names_are_short_and_different() -> None:
    assert _short_names(["loss/train/total", "loss/train/ce", "metrics/train/Accuracy"]) == ["loss", "ce", "Accuracy"]
    assert _short_names(["metrics/a/Dice", "metrics/b/Dice"]) == ["metrics/a/Dice", "metrics/b/Dice"]
    (name,) = _short_names(["metrics/train/MultilabelRecallAtFixedPrecision"])
    assert name == "MultilabelRe...Precision"
