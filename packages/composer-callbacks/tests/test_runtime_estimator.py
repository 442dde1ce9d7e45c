from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.callbacks import runtime_estimator
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.core import Engine, State
from composer.loggers import InMemoryLogger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only by hand."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(runtime_estimator, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class Loop:
    """A loop by hand: the first batch takes 50 seconds, every other one 2; an evaluation takes 10."""

    def __init__(
        self, clock: Any, estimator: RuntimeEstimator, max_duration: str | None = "10ba", length: int = 10
    ) -> None:
        self.clock, self.memory = clock, InMemoryLogger()
        loader: Any = [0] * length
        self.state = State(
            torch.nn.Linear(1, 1), max_duration=max_duration, dataloader=loader, callbacks=[estimator, self.memory]
        )
        self.engine = Engine(self.state)
        self.engine.run_event("init")
        self.engine.run_event("fit_start")

    def batches(self, number: int, seconds: float = 2.0) -> None:
        for _ in range(number):
            self.engine.run_event("batch_start")
            duration = 50 if self.state.timestamp.batch == "0ba" else seconds
            self.state.timestamp = self.state.timestamp.to_next_batch(4, duration=duration)
            self.engine.run_event("batch_end")

    def evaluate(self, label: str = "eval") -> None:
        before = self.state.dataloader
        self.state.set_dataloader([0], label)
        self.engine.run_event("eval_start")
        self.clock.now += 10
        self.engine.run_event("eval_end")
        self.state.set_dataloader(before, "train")

    @property
    def estimates(self) -> list[float]:
        return [value for _, value in self.memory.data.get("time/remaining_estimate", [])]


@pytest.mark.parametrize("max_duration", ["10ba", "40sp", "2ep"])
@pytest.mark.parametrize(("unit", "seconds"), [("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400)])
def test_what_is_left_is_estimated_from_all_but_the_first_batch(
    clock: Any, max_duration: str, unit: str, seconds: int
) -> None:
    loop = Loop(clock, RuntimeEstimator(time_unit=unit), max_duration, 5)
    loop.batches(5)
    assert loop.estimates == pytest.approx([left * 2 / seconds for left in (8, 7, 6, 5)])
    assert loop.memory.hyperparameters == {"time/remaining_estimate_unit": unit}


@pytest.mark.parametrize(("skipped", "logged"), [(0, 6), (1, 5), (3, 3)])
def test_skipped_batches_are_not_logged(clock: Any, skipped: int, logged: int) -> None:
    loop = Loop(clock, RuntimeEstimator(skip_batches=skipped))
    loop.batches(6)
    assert len(loop.estimates) == logged


def test_evaluations_are_no_training_and_come_again(clock: Any) -> None:
    estimator = RuntimeEstimator(time_unit="seconds")
    loop = Loop(clock, estimator)
    for _ in range(2):
        loop.batches(2)
        loop.evaluate()
    loop.batches(1)
    # 5 batches of 2 seconds, and an evaluation of 10 seconds for every second one.
    assert loop.estimates[-1] == pytest.approx(5 * 2 + 5 * 0.5 * 10)
    assert estimator.eval_frequency_per_label == {"eval": 0.5}


def test_evaluators_are_told_apart_and_never_run_more_often_than_once_per_batch(clock: Any) -> None:
    estimator = RuntimeEstimator()
    loop = Loop(clock, estimator)
    loop.batches(1)
    for label in ("a", "a", "b"):
        loop.evaluate(label)
    loop.batches(1)
    loop.evaluate("b")
    assert estimator.eval_frequency_per_label == {"a": 1.0, "b": 1.0}


def test_standalone_evaluations_do_not_count(clock: Any) -> None:
    estimator = RuntimeEstimator(time_unit="seconds")
    loop = Loop(clock, estimator)
    loop.batches(4)
    loop.engine.run_event("eval_standalone_start")
    loop.evaluate()
    loop.engine.run_event("eval_standalone_end")
    loop.batches(1)
    assert loop.estimates[-1] == pytest.approx(10.0)
    assert estimator.eval_frequency_per_label == {}


def test_a_run_that_is_extended_in_another_unit_is_measured_anew(clock: Any) -> None:
    loop = Loop(clock, RuntimeEstimator(time_unit="seconds"))
    loop.batches(3)
    loop.state.max_duration = "80sp"
    loop.batches(2, seconds=4)
    assert loop.estimates[-1] == pytest.approx(15 * 4)


def test_a_run_of_seconds_ends_when_they_are_over(clock: Any) -> None:
    loop = Loop(clock, RuntimeEstimator(time_unit="seconds"), "100sec")
    loop.batches(3)
    assert loop.estimates == pytest.approx([48.0, 46.0])


def test_a_loop_that_records_no_durations_gets_no_estimate(clock: Any) -> None:
    loop = Loop(clock, RuntimeEstimator(skip_batches=0))
    for _ in range(2):
        loop.engine.run_event("batch_start")
        loop.state.timestamp = loop.state.timestamp.to_next_batch(4)
        loop.engine.run_event("batch_end")
    assert loop.estimates == []


def test_a_run_without_end_warns_once(clock: Any) -> None:
    loop = Loop(clock, RuntimeEstimator(skip_batches=0), max_duration="10ba")
    loop.state._max_duration = None
    with pytest.warns(UserWarning, match="because `max_duration` is not set"):
        loop.batches(1)
    loop.batches(1)
    assert loop.estimates == []


@pytest.mark.parametrize("skipped", [-1, 1.0, True])
def test_impossible_arguments_are_refused(skipped: Any) -> None:
    with pytest.raises(ValueError, match=r"`skip_batches` must be .*at least 0 batches"):
        RuntimeEstimator(skip_batches=skipped)
    with pytest.raises(ValueError, match="`time_unit` must be one of"):
        RuntimeEstimator(time_unit="fortnights")


def test_a_run_with_the_trainer(run: Any, make_loader: Any) -> None:
    estimator = RuntimeEstimator(skip_batches=2)
    done = run(estimator, eval_dataloader=make_loader(), eval_interval="2ba").fit()
    assert len(done.values("time/remaining_estimate")) == 8 - 2
    assert estimator.eval_frequency_per_label == {"eval": 0.5}
    assert done.values("time/remaining_estimate")[-1] == 0.0
