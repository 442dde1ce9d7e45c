from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer.core import Time
from composer.loggers import DeferredValue
from composer.loggers.console_logger import NUM_EVAL_LOGGING_EVENTS, ConsoleLogger


def metric_lines(stream: io.StringIO, kind: str) -> list[str]:
    """The lines that show a loss or a metric."""
    lines = stream.getvalue().splitlines()
    return [line for line in lines if f"\t {kind} " in line and "trainer/" not in line and "time/" not in line]


def headers(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().splitlines() if line.startswith("[") and "Eval" not in line]


def test_a_run_prints_exactly_this(start: Any) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream), "1ep", 2)
    run.logger.log_hyperparameters({"seed": 3, "enabled_algorithms/MixUp": True})
    run.fit()
    run.evaluate()

    assert stream.getvalue() == (
        "******************************\n"
        "Config:\n"
        "enabled_algorithms/MixUp: true\n"
        "seed: 3\n"
        "\n"
        "******************************\n"
        "[epoch=1][batch=1/2]:\n"
        "\t Train time/epoch: 0\n"
        "\t Train time/batch: 0\n"
        "\t Train time/sample: 0\n"
        "\t Train time/batch_in_epoch: 0\n"
        "\t Train time/sample_in_epoch: 0\n"
        "\t Train trainer/device_train_microbatch_size: 2\n"
        "\t Train loss/train/total: 1.0000\n"
        "\t Train metrics/train/accuracy: 0.0100\n"
        "[epoch=1][batch=2/2]:\n"
        "\t Train time/batch: 1\n"
        "\t Train time/sample: 2\n"
        "\t Train time/batch_in_epoch: 1\n"
        "\t Train time/sample_in_epoch: 2\n"
        "\t Train trainer/device_train_microbatch_size: 2\n"
        "\t Train loss/train/total: 2.0000\n"
        "\t Train metrics/train/accuracy: 0.0200\n"
        "[Eval batch=1/3] Eval on eval data\n"
        "[Eval batch=2/3] Eval on eval data\n"
        "[Eval batch=3/3] Eval on eval data:\n"
        "\t Eval metrics/eval/accuracy: 0.7500\n"
    )


@pytest.mark.parametrize(
    ("interval", "duration", "batches", "expected"),
    [
        ("1ba", "2ep", 3, ["1/3", "2/3", "3/3", "1/3", "2/3", "3/3"]),
        ("2ba", "2ep", 3, ["1/3", "2/3", "1/3", "3/3"]),
        ("5ba", "2ep", 3, ["1/3", "2/3", "3/3"]),
        ("9ba", "2ep", 3, ["1/3", "3/3"]),
        ("1ep", "2ep", 3, ["3/3", "3/3"]),
        ("2ep", "2ep", 3, ["3/3", "3/3"]),
        ("2ep", "3ep", 3, ["3/3", "3/3", "3/3"]),
        (2, "4ep", 1, ["1/1", "1/1", "1/1"]),
        ("1ba", "4ba", 3, ["1/4", "2/4", "3/4", "4/4"]),
        ("3ba", "4ba", 3, ["1/4", "3/4", "4/4"]),
        ("8ba", "12ba", 100, ["1/12", "8/12", "12/12"]),
        ("1ep", "4ba", 2, ["2/4", "4/4"]),
        ("1ep", "4ba", 3, ["3/4", "4/4"]),
        ("2ba", "6sp", 10, ["2/6", "4/6", "6/6"]),
    ],
)
def test_blocks_are_printed_at_the_interval_at_the_first_and_at_the_end(
    start: Any, interval: Any, duration: str, batches: int, expected: list[str]
) -> None:
    stream = io.StringIO()
    start(ConsoleLogger(interval, stream), duration, batches).fit()

    printed = [re.search(r"\[(?:batch|sample)=([^]]+)\]", header) for header in headers(stream)]

    assert expected == [found.group(1) for found in printed if found]
    assert 2 * len(expected) == len(metric_lines(stream, "Train"))  # the loss and the accuracy


def test_a_block_holds_everything_logged_since_the_one_before(start: Any) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("8ba", stream), "12ba", 12)
    seen: list[int] = []
    original = run.train_batch

    def train_batch() -> None:
        run.logger.log_metrics({f"rare/{run.state.timestamp.batch.value}": 1})
        original()
        seen.append(len(metric_lines(stream, "Train")))

    run.train_batch = train_batch
    run.fit()

    assert seen == [3] * 7 + [3 + 2 + 7] * 5
    assert len(metric_lines(stream, "Train")) == 3 + (2 + 7) + (2 + 4)


def test_the_last_values_are_printed(start: Any) -> None:
    stream = io.StringIO()
    start(ConsoleLogger("3ba", stream), "5ba", 5).fit()

    assert [line.split(": ")[1] for line in metric_lines(stream, "Train")] == [
        "1.0000",
        "0.0100",
        "3.0000",
        "0.0300",
        "5.0000",
        "0.0500",
    ]


@pytest.mark.parametrize(("duration", "computed"), [("10ba", 3), ("1ep", 2), ("2ep", 3)])
def test_metrics_of_batches_that_are_not_printed_are_not_computed(start: Any, duration: str, computed: int) -> None:
    """In "1ep" the last block is printed after the epoch, for which the metrics are logged anew."""
    run = start(ConsoleLogger("8ba", io.StringIO()), duration, 10)
    run.fit()

    assert computed == run.computed


def test_stopping_the_training_prints_the_last_batch(start: Any) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("100ba", stream), "10ep", 10)
    original = run.train_batch

    def train_batch() -> None:
        original()
        if run.state.timestamp.batch == "3ba":
            run.state.stop_training()

    run.train_batch = train_batch
    run.fit()

    assert [line.split(": ")[1] for line in metric_lines(stream, "Train")] == ["1.0000", "0.0100", "3.0000"]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (10, list(range(1, 11))),
        (11, list(range(1, 12))),
        (101, [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101]),
        (321, [1, 33, 65, 97, 129, 161, 193, 225, 257, 289, 321]),
    ],
)
def test_an_evaluation_prints_its_progress_at_every_tenth(start: Any, batches: int, expected: list[int]) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream), eval_batches=batches)
    run.evaluate()

    lines = [line for line in stream.getvalue().splitlines() if "Eval batch" in line]

    assert min(batches, NUM_EVAL_LOGGING_EVENTS) == len(lines)
    assert [f"[Eval batch={i}/{batches}] Eval on eval data" for i in expected] == [line.rstrip(":") for line in lines]
    assert metric_lines(stream, "Eval") == ["\t Eval metrics/eval/accuracy: 0.7500"]


def test_an_evaluation_of_unknown_length_prints_its_results(start: Any) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream))
    run.state.set_dataloader(iter(()), "gsm8k")
    run.engine.run_event("eval_start")
    run.state.eval_timestamp = run.state.eval_timestamp.to_next_batch()
    run.engine.run_event("eval_batch_end")
    run.logger.log_metrics({"metrics/gsm8k/accuracy": 0.5})
    run.engine.run_event("eval_end")

    assert stream.getvalue() == "[Eval batch=1] Eval on gsm8k data:\n\t Eval metrics/gsm8k/accuracy: 0.5000\n"


def test_training_metrics_wait_while_an_evaluation_prints_its_own(start: Any) -> None:
    stream = io.StringIO()
    start(ConsoleLogger("4ba", stream), "4ba", 4, eval_every=3, eval_batches=1).fit()

    assert metric_lines(stream, "Eval") == ["\t Eval metrics/eval/accuracy: 0.7500"]
    assert [line.split(": ")[1] for line in metric_lines(stream, "Train")] == ["1.0000", "0.0100", "4.0000", "0.0400"]


def test_a_deferred_result_of_an_evaluation_is_held(start: Any) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream))
    result = DeferredValue(lambda: torch.tensor(0.5))
    run.engine.run_event("eval_start")
    run.logger.log_metrics({"metrics/eval/accuracy": result})
    result.expire()
    run.engine.run_event("eval_end")

    assert metric_lines(stream, "Eval") == ["\t Eval metrics/eval/accuracy: 0.5000"]


def test_tables_are_printed_once_with_the_next_block(start: Any) -> None:
    stream = io.StringIO()
    logger = ConsoleLogger("1ba", stream)
    run = start(logger, "2ba", 2)
    run.logger.log_table(["a"], [[1]], name="counts")

    assert logger.tables == {"counts": '{"columns":["a"],"data":[[1]]}'}

    run.fit()

    assert stream.getvalue().count('\n\t Train counts: {"columns":["a"],"data":[[1]]}\n') == 1
    assert logger.tables == {}


def test_log_to_console_prints_any_values(start: Any) -> None:
    stream = io.StringIO()
    logger = ConsoleLogger("1ba", stream)
    run = start(logger, "10sp", 5)
    logger.log_to_console({"a": 1, "b": "text"}, run.state)
    logger.log_to_console({}, run.state, prefix="Eval ", is_train=False)

    assert stream.getvalue() == '[sample=0/10]:\n\t a: 1\n\t b: "text"\n[Eval batch=0/5] Eval on train data:\n'


def test_what_is_logged_can_be_looked_at(start: Any) -> None:
    logger = ConsoleLogger("5ba", io.StringIO())
    run = start(logger)
    run.logger.log_metrics({"a": 1})
    run.logger.log_hyperparameters({"seed": 3})

    assert logger.logged_metrics == {"a": 1}
    assert logger.hparams == {"seed": 3}


@pytest.mark.parametrize("event", ["fit_start", "predict_start", "eval_start"])
def test_hyperparameters_are_printed_once_at_the_first_start(start: Any, event: str) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream))
    run.logger.log_hyperparameters({"seed": 3})
    run.engine.run_event(event)
    stars = "*" * 30

    assert f"{stars}\nConfig:\nseed: 3\n\n{stars}\n" == stream.getvalue()

    for again in ("fit_start", "predict_start", "eval_start"):
        run.engine.run_event(again)

    assert stream.getvalue().count("Config:") == 1


@pytest.mark.parametrize("log_traces", [True, False])
def test_traces_are_printed_on_demand(start: Any, log_traces: bool) -> None:
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream, log_traces))
    run.logger.log_traces({"algorithm_traces/MixUp/Event.INIT": 1})

    assert ("[trace]: algorithm_traces/MixUp/Event.INIT:1\n" if log_traces else "") == stream.getvalue()


def test_only_the_first_rank_of_a_node_prints(start: Any, local_rank: Callable[[int], None]) -> None:
    """It computes what it would print all the same: computing a metric may be a collective of all ranks."""
    local_rank(1)
    stream = io.StringIO()
    run = start(ConsoleLogger("1ba", stream, log_traces=True), "3ba", 5, eval_every=2)
    run.logger.log_traces({"a": 1})
    run.fit()

    assert stream.getvalue() == ""
    assert run.computed == 3


def test_the_stream_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    assert sys.stdout is ConsoleLogger(stream="stdout").stream
    assert sys.stderr is ConsoleLogger(stream="stderr").stream is ConsoleLogger().stream


def test_bad_arguments_are_refused() -> None:
    for interval in ("10sp", "0.1dur", "10tok", "0ba", -1):
        with pytest.raises(ValueError, match="`log_interval` must be a positive number of epochs or batches"):
            ConsoleLogger(interval)
    with pytest.raises(ValueError, match="`stream` must be 'stdout', 'stderr' or a text stream, got 'file'"):
        ConsoleLogger(stream="file")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`stream` must be 'stdout', 'stderr' or a text stream, got 3"):
        ConsoleLogger(stream=3)  # type: ignore[arg-type]


def test_a_time_is_an_interval() -> None:
    assert Time(3, "ba") == ConsoleLogger(Time(3, "ba")).log_interval
    assert Time(2, "ep") == ConsoleLogger(2).log_interval
