from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import tqdm.auto

import composer.loggers._bar as bar_module
from composer.loggers import DeferredValue
from composer.loggers._bar import Bar
from composer.loggers.progress_bar_logger import ProgressBarLogger


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces tqdm by mocks, and sorts the bars it made by their format."""
    made = SimpleNamespace(train=[], eval=[])

    def make(bar_format: str, *args: Any, **kwargs: Any) -> MagicMock:
        mock = MagicMock()
        mock.n = 0
        mock.arguments = kwargs
        if "train" in bar_format:
            made.train.append(mock)
        if "eval" in bar_format:
            made.eval.append(mock)
        return mock

    monkeypatch.setattr(tqdm.auto, "tqdm", make)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stops the clock of the bars, which then only goes on by hand: `clock.now += 1`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(bar_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(tqdm.std, "time", lambda: clock.now)
    return clock


def updates(bar: MagicMock) -> list[int]:
    return [call.args[0] for call in bar.update.call_args_list]


# ---- which bars there are, and how they move ----


@pytest.mark.parametrize(
    ("duration", "batches", "expected"),
    [
        ("1ep", 5, [[1] * 5]),
        ("3ep", 2, [[1, 1]] * 3),
        ("7ba", 5, [[1] * 7]),
        ("8sp", 3, [[2] * 4]),
    ],
)
def test_training_bars_move_once_per_batch(
    start: Any, bars: SimpleNamespace, duration: str, batches: int, expected: list[list[int]]
) -> None:
    start(ProgressBarLogger(), duration, batches).fit()

    assert expected == [updates(bar) for bar in bars.train]
    assert [1] * len(expected) == [bar.close.call_count for bar in bars.train]
    assert [] == bars.eval


@pytest.mark.parametrize(
    ("duration", "total", "unit"), [("2ep", 5, "ba"), ("7ba", 7, "ba"), ("8sp", 8, "sp"), ("1000tok", 1000, "tok")]
)
def test_the_bar_is_as_long_as_the_run(start: Any, bars: SimpleNamespace, duration: str, total: int, unit: str) -> None:
    run = start(ProgressBarLogger(), duration, 5)
    run.engine.run_event("fit_start")
    run.engine.run_event("epoch_start")

    assert [(total, unit, 0)] == [tuple(bar.arguments[k] for k in ("total", "unit", "initial")) for bar in bars.train]


def test_every_evaluation_has_a_bar(start: Any, bars: SimpleNamespace) -> None:
    start(ProgressBarLogger(), "4ba", 4, eval_every=2, eval_batches=3).fit()

    assert [[1, 1, 1], [1, 1, 1]] == [updates(bar) for bar in bars.eval]
    assert [3, 3] == [bar.arguments["total"] for bar in bars.eval]
    assert [[1] * 4] == [updates(bar) for bar in bars.train]
    assert [1, 1] == [bar.close.call_count for bar in bars.eval]


def test_an_epoch_can_be_continued_without_its_start(start: Any, bars: SimpleNamespace) -> None:
    """Resumed from a checkpoint in the middle of an epoch."""
    run = start(ProgressBarLogger(), "2ep", 4)
    run.state.timestamp = run.state.timestamp.to_next_batch().to_next_batch().to_next_batch()
    run.fit()

    assert [3, 0] == [bar.arguments["initial"] for bar in bars.train]
    assert [[1], [1] * 4] == [updates(bar) for bar in bars.train]


def test_a_second_fit_goes_on(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "2ba", 5)
    run.fit()
    run.state.max_duration = "5ba"
    run.fit()

    assert [(2, 0), (5, 2)] == [(bar.arguments["total"], bar.arguments["initial"]) for bar in bars.train]
    assert [[1, 1], [1, 1, 1]] == [updates(bar) for bar in bars.train]


def test_a_fit_after_a_failed_one_starts_with_a_new_bar(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "5ba", 5)
    run.fit(stop_after=2)
    run.fit()

    assert [[1, 1], [1, 1, 1]] == [updates(bar) for bar in bars.train]
    assert [1, 1] == [bar.close.call_count for bar in bars.train]


def test_open_bars_are_closed_with_the_run(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "5ba", 5)
    run.fit(stop_after=2)
    run.engine.run_event("eval_start")
    run.close()

    assert [1, 1] == [bar.close.call_count for bar in bars.train]


def test_only_the_first_rank_of_a_node_draws(
    start: Any, bars: SimpleNamespace, local_rank: Callable[[int], None]
) -> None:
    local_rank(1)
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream, log_traces=True), "4ba", 4, eval_every=2)
    run.logger.log_traces({"a": 1})
    run.fit()

    assert [] == bars.train == bars.eval
    assert "" == stream.getvalue()


# ---- what they show ----


def shown(terminal: io.StringIO) -> list[str]:
    """What stood on the line, one state after the other."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", terminal.getvalue()) if line.strip()]


def test_a_finished_bar_shows_progress_time_rate_and_loss(start: Any, clock: SimpleNamespace) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), "1ep", 4)
    run.fit(stop_after=2)
    clock.now += 4
    for _ in range(2):
        run.train_batch()
    run.engine.run_event("epoch_end")

    bar = "\u2588" * 10
    assert f"train epoch 1    100%|{bar}| 4/4 [00:04<00:00,  1.00ba/s, loss/train/total=4]" == shown(terminal)[-1]
    assert terminal.getvalue().endswith("\n")


def test_a_bar_is_redrawn_by_the_clock_not_by_the_step(start: Any, clock: SimpleNamespace) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), "1000ba", 10)
    run.fit(stop_after=1)
    before = terminal.getvalue()
    for _ in range(50):
        run.train_batch()

    assert before == terminal.getvalue()

    clock.now += 0.11
    run.train_batch()

    assert "| 52/1000 [" in shown(terminal)[-1]
    assert "loss/train/total=52]" in shown(terminal)[-1]


def test_losses_are_read_only_when_the_bar_is_redrawn(start: Any, clock: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(Terminal()), "1000ba", 10)
    run.fit(stop_after=1)
    losses = [DeferredValue.of_tensor(torch.tensor(float(i))) for i in range(3)]
    for i, loss in enumerate(losses):
        run.logger.log_metrics({"loss/train/total": loss})
        clock.now += 0.11 * (i == 1)
        run.state.timestamp = run.state.timestamp.to_next_batch()
        run.engine.run_event("batch_end")

    assert ["DeferredValue(<not read>)", "DeferredValue(1.0)", "DeferredValue(<not read>)"] == [
        repr(loss) for loss in losses
    ]


def test_a_value_on_its_way_is_shown_when_it_arrives(
    start: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the copy is not there at once, and the step must not wait for it."""
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), "1000ba", 10)
    run.fit(stop_after=1)
    arrived = False
    fetched: list[DeferredValue] = []
    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: arrived))
    monkeypatch.setattr(DeferredValue, "fetch", lambda values: fetched.extend(values))

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
    assert "loss/train/total=1]" in waiting
    assert "| 5/1000 [" in shown(terminal)[-1]
    assert "loss/train/total=2]" in shown(terminal)[-1]
    assert 2.0 == fetched[0].value


def test_the_training_metrics_are_never_computed_for_the_bar(start: Any) -> None:
    run = start(ProgressBarLogger(Terminal()), "2ep", 5)
    run.fit()

    assert 0 == run.computed


def test_the_bar_of_an_evaluation_shows_its_results(start: Any) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), "4ba", 4, eval_every=2, eval_label="gsm8k")
    run.fit()
    results = [line for line in shown(terminal) if "metrics/gsm8k/accuracy=0.75]" in line]

    assert ["gsm8k batch 2  ", "gsm8k batch 4  "] == [line[:15] for line in results]
    assert all("| 3/3 [" in line for line in results)


def test_evaluations_of_a_run_in_epochs_name_the_epoch(start: Any, bars: SimpleNamespace) -> None:
    logger = ProgressBarLogger()
    run = start(logger, "2ep", 4, eval_batches=1)
    titles = []

    def evaluate() -> None:
        run.state.set_dataloader([None], "eval")
        run.engine.run_event("eval_start")
        assert logger.eval_pbar is not None
        titles.append(logger.eval_pbar.bar_format.partition("{")[0].rstrip())
        run.engine.run_event("eval_end")
        run.state.set_dataloader([None] * 4, "train")

    evaluate()
    run.fit(stop_after=2)
    evaluate()
    run.fit(stop_after=2)
    evaluate()
    run.state.timestamp = run.state.timestamp.to_next_epoch()
    evaluate()

    assert ["eval", "eval  epoch 1", "eval  epoch 1", "eval  epoch 1"] == titles


def test_an_evaluation_does_not_count_into_the_rate_of_the_training(start: Any, clock: SimpleNamespace) -> None:
    terminal = Terminal()
    logger = ProgressBarLogger(terminal)
    run = start(logger, "100ba", 100)
    run.fit(stop_after=1)
    clock.now += 5
    run.train_batch()

    run.engine.run_event("eval_start")
    assert logger.train_pbar is not None
    logger._eval_started = clock.now
    clock.now += 3600
    logger.train_pbar.resume(3600)

    clock.now += 5
    run.train_batch()

    assert "3/100 [00:10<" in shown(terminal)[-1]


def test_a_run_without_a_known_length_shows_no_time_left(start: Any) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), "1ep", None)
    run.fit(stop_after=3)
    run.engine.run_event("epoch_end")

    assert re.fullmatch(r"train epoch 1\s+3 \[00:00, .*ba/s, loss/train/total=3\]", shown(terminal)[-1])


def test_a_last_batch_that_reaches_past_the_end_completes_the_bar(start: Any) -> None:
    terminal = Terminal()
    start(ProgressBarLogger(terminal), "5sp", 10).fit()

    assert "train            100%|" in shown(terminal)[-1]
    assert "| 6/6 [" in shown(terminal)[-1]


def test_a_label_with_braces_is_no_format(start: Any) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal), eval_label="{eval}")
    run.evaluate()

    assert shown(terminal)[-1].startswith("{eval}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), "0.5"),
        (torch.tensor(7), "7"),
        (torch.zeros(2), "Tensor of shape torch.Size([2])"),
        (DeferredValue(lambda: torch.tensor(1e-7)), "1e-07"),
        (123456.0, "1.235e+05"),
        (3, "3"),
        ("text", '"text"'),
    ],
)
def test_any_value_can_be_shown(value: Any, expected: str) -> None:
    terminal = Terminal()
    bar = Bar(10, "{n_fmt}{postfix}", "batch", ["loss"])
    bar.show(terminal)
    bar.log({"loss": value, "lr": 1})
    if isinstance(value, torch.Tensor):
        value += 1  # must not show
    bar.close()

    assert f"0, loss={expected}" == shown(terminal)[-1]


# ---- where they are drawn ----


def test_a_log_file_gets_one_plain_line_per_bar(start: Any) -> None:
    stream = io.StringIO()
    start(ProgressBarLogger(stream), "2ep", 50, eval_every=25, eval_batches=4).fit()
    lines = stream.getvalue().splitlines()

    assert 2 + 4 == len(lines)
    assert re.fullmatch(r"eval  epoch 1    100% 4/4 \[00:00<00:00, .*ba/s, metrics/eval/accuracy=0.75\]", lines[0])
    assert re.fullmatch(r"train epoch 1    100% 50/50 \[00:0\d<00:00, .*ba/s, loss/train/total=50\]", lines[2])
    assert "\r" not in stream.getvalue()


def test_a_log_file_gets_a_line_every_half_minute(start: Any, clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream), "1000ba", 10)
    run.fit(stop_after=1)
    for _ in range(99):
        clock.now += 1
        run.train_batch()
    lines = stream.getvalue().splitlines()

    assert [30, 60, 90] == [int(re.search(r"(\d+)/1000", line).group(1)) - 1 for line in lines]  # type: ignore[union-attr]
    assert lines[0].endswith("loss/train/total=31]")


@pytest.mark.parametrize("columns", [31, 80, 200])
def test_a_terminal_of_any_width_is_enough(start: Any, columns: int) -> None:
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        start(ProgressBarLogger(terminal), "1ep", 2).fit()
        written = os.read(master, 100_000).decode()
    os.close(master)
    lines = shown(io.StringIO(written))

    assert max(len(line) for line in lines) <= columns - 1
    assert (columns > 70) == lines[-1].endswith("loss/train/total=2]")


def test_tqdm_can_be_switched_off(start: Any) -> None:
    class Disabled(tqdm.std.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.auto, "tqdm", Disabled)
        start(ProgressBarLogger(terminal), "2ep", 5, eval_every=5).fit()

    assert "%" not in terminal.getvalue()


@pytest.mark.parametrize("event", ["fit_start", "predict_start", "eval_start"])
def test_hyperparameters_are_printed_once_at_the_first_start(start: Any, bars: SimpleNamespace, event: str) -> None:
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream))
    run.engine.run_event(event)

    assert "" == stream.getvalue()

    run.logger.log_hyperparameters({"seed": 3})
    run.engine.run_event(event)
    run.engine.run_event("fit_start")
    stars = "*" * 30

    assert f"{stars}\nConfig:\nseed: 3\n\n{stars}\n" == stream.getvalue()


@pytest.mark.parametrize("log_traces", [True, False])
def test_traces_are_printed_on_demand_above_the_bar(start: Any, log_traces: bool) -> None:
    terminal = Terminal()
    run = start(ProgressBarLogger(terminal, log_traces), "5ba", 5)
    run.fit(stop_after=1)
    run.logger.log_traces({"algorithm_traces/MixUp/Event.INIT": 1})

    assert log_traces == terminal.getvalue().endswith("\r[trace]: algorithm_traces/MixUp/Event.INIT:1\n")
    assert log_traces == ("trace" in terminal.getvalue())


# ---- resumption ----


def test_both_bars_are_saved_and_restored_each_from_its_own_state(start: Any, bars: SimpleNamespace) -> None:
    logger = ProgressBarLogger()
    run = start(logger, "100sp", 10)
    run.fit(stop_after=3)
    run.state.set_dataloader([None] * 7, "eval")
    run.engine.run_event("eval_start")
    run.state.eval_timestamp = run.state.eval_timestamp.to_next_batch()
    run.engine.run_event("eval_batch_end")
    run.logger.log_metrics({"metrics/eval/accuracy": torch.tensor(0.5)})
    saved = logger.state_dict()

    assert {
        "total": 100,
        "position": 0,
        "bar_format": saved["train_pbar"]["bar_format"],
        "metrics": {"loss/train/total": 3.0},
        "keys_to_log": ["loss/train"],
        "n": 6,
        "timestamp_key": "sample",
    } == saved["train_pbar"]
    assert (7, 1, {"metrics/eval/accuracy": 0.5}, "batch") == tuple(
        saved["eval_pbar"][key] for key in ("total", "n", "metrics", "timestamp_key")
    )
    assert "train" in saved["train_pbar"]["bar_format"]
    assert "eval" in saved["eval_pbar"]["bar_format"]

    restored = ProgressBarLogger()
    restored.load_state_dict(saved)

    assert saved == restored.state_dict()


def test_without_bars_there_is_nothing_to_save() -> None:
    logger = ProgressBarLogger()

    assert {"train_pbar": None, "eval_pbar": None} == logger.state_dict()

    logger.load_state_dict({"train_pbar": None, "eval_pbar": None})

    assert {"train_pbar": None, "eval_pbar": None} == logger.state_dict()


def test_a_resumed_run_goes_on_with_the_last_loss(start: Any) -> None:
    first = ProgressBarLogger(Terminal())
    run = start(first, "10ba", 10)
    run.fit(stop_after=3)

    terminal = Terminal()
    second = ProgressBarLogger(terminal)
    again = start(second, "10ba", 10)
    again.state.timestamp = run.state.timestamp
    second.load_state_dict(first.state_dict())
    again.engine.run_event("fit_start")
    again.engine.run_event("fit_end")

    assert "| 3/10 [" in shown(terminal)[-1]
    assert shown(terminal)[-1].endswith("loss/train/total=3]")
