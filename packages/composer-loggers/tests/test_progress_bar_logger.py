"""The bars and their progress, with a replacement of tqdm."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from composer.loggers.progress_bar_logger import ProgressBarLogger


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
        ("2sec", 3, [[0, 1, 0, 1]]),
    ],
)
def test_training_bars_move_once_per_batch(
    start: Any, bars: SimpleNamespace, duration: str, batches: int, expected: list[list[int]]
) -> None:
    start(ProgressBarLogger(), duration, batches).fit()

    assert expected == [updates(bar) for bar in bars.train]
    assert [1] * len(expected) == [bar.close.call_count for bar in bars.train]
    assert bars.eval == []


@pytest.mark.parametrize(
    ("duration", "total", "unit"),
    [("2ep", 5, "ba"), ("7ba", 7, "ba"), ("8sp", 8, "sp"), ("1000tok", 1000, "tok"), ("1m", 60, "sec")],
)
def test_the_bar_is_as_long_as_the_run(start: Any, bars: SimpleNamespace, duration: str, total: int, unit: str) -> None:
    run = start(ProgressBarLogger(), duration, 5)
    run.engine.run_event("fit_start")
    run.engine.run_event("epoch_start")

    assert [(total, unit, 0)] == [tuple(bar.arguments[k] for k in ("total", "unit", "initial")) for bar in bars.train]


def test_every_evaluation_has_a_bar(start: Any, bars: SimpleNamespace) -> None:
    start(ProgressBarLogger(), "4ba", 4, eval_every=2, eval_batches=3).fit()

    assert [updates(bar) for bar in bars.eval] == [[1, 1, 1], [1, 1, 1]]
    assert [bar.arguments["total"] for bar in bars.eval] == [3, 3]
    assert [updates(bar) for bar in bars.train] == [[1] * 4]
    assert [bar.close.call_count for bar in bars.eval] == [1, 1]


def test_an_epoch_can_be_continued_without_its_start(start: Any, bars: SimpleNamespace) -> None:
    """Resumed from a checkpoint in the middle of an epoch."""
    run = start(ProgressBarLogger(), "2ep", 4)
    run.state.timestamp = run.state.timestamp.to_next_batch().to_next_batch().to_next_batch()
    run.fit()

    assert [bar.arguments["initial"] for bar in bars.train] == [3, 0]
    assert [updates(bar) for bar in bars.train] == [[1], [1] * 4]


def test_a_second_fit_continues_the_bar(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "2ba", 5)
    run.fit()
    run.state.max_duration = "5ba"
    run.fit()

    assert [(bar.arguments["total"], bar.arguments["initial"]) for bar in bars.train] == [(2, 0), (5, 2)]
    assert [updates(bar) for bar in bars.train] == [[1, 1], [1, 1, 1]]


def test_a_fit_after_a_failed_one_starts_with_a_new_bar(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "5ba", 5)
    run.fit(stop_after=2)
    run.fit()

    assert [updates(bar) for bar in bars.train] == [[1, 1], [1, 1, 1]]
    assert [bar.close.call_count for bar in bars.train] == [1, 1]


def test_open_bars_are_closed_with_the_run(start: Any, bars: SimpleNamespace) -> None:
    run = start(ProgressBarLogger(), "5ba", 5)
    run.fit(stop_after=2)
    run.engine.run_event("eval_start")
    run.close()

    assert [bar.close.call_count for bar in bars.train] == [1, 1]


def test_only_the_first_rank_of_a_node_draws(
    start: Any, bars: SimpleNamespace, local_rank: Callable[[int], None]
) -> None:
    local_rank(1)
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream, log_traces=True), "4ba", 4, eval_every=2)
    run.logger.log_traces({"a": 1})
    run.fit()

    assert [] == bars.train == bars.eval
    assert stream.getvalue() == ""


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

    assert titles == ["eval", "eval  epoch 1", "eval  epoch 1", "eval  epoch 1"]


@pytest.mark.parametrize("event", ["fit_start", "predict_start", "eval_start"])
def test_hyperparameters_are_printed_once_at_the_first_start(start: Any, bars: SimpleNamespace, event: str) -> None:
    stream = io.StringIO()
    run = start(ProgressBarLogger(stream))
    run.engine.run_event(event)

    assert stream.getvalue() == ""

    run.logger.log_hyperparameters({"seed": 3})
    run.engine.run_event(event)
    run.engine.run_event("fit_start")
    stars = "*" * 30

    assert f"{stars}\nConfig:\nseed: 3\n\n{stars}\n" == stream.getvalue()
