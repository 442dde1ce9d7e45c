from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from composer.algorithms.scale_schedule import ScaleSchedule
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.recipes import Recipe, Runs, run

Make = Callable[..., Recipe]


class Clock(Algorithm):
    """A clock that moves by 1 in each training batch and by 100 in each batch of an evaluation.

    A deep copy is the object itself, so that all runs of a recipe share it.
    """

    events = frozenset({Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD})

    def __init__(self) -> None:
        self.seconds = 0.0

    def __deepcopy__(self, memo: object) -> Clock:
        return self

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seconds += 1 if event is Event.BEFORE_FORWARD else 100


class Sleeper(Algorithm):
    """Makes evaluations slow."""

    events = frozenset({Event.EVAL_BEFORE_FORWARD})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("epochs", "interval", "expected", "total"),
    [
        (3, "1ep", [3, 6, 9], 9),
        (2, "2ba", [2, 4, 6], 6),
        (2, "4ba", [4, 6], 6),  # the end is not at the interval
        (2, "4ep", [6], 6),
        (2, "100ba", [6], 6),
        (1, "1ba", [1, 2, 3], 3),
        (1.5, "1ep", [3, 4], 4),  # 1.5 epochs of 3 batches are 4: Python rounds 4.5 to the even number
        (0.4, "1ep", [1], 1),
    ],
)
def test_training_time_does_not_include_evaluations(
    tiny: Make,
    one: Runs,
    monkeypatch: pytest.MonkeyPatch,
    epochs: float,
    interval: str,
    expected: list[int],
    total: int,
) -> None:
    clock = Clock()
    monkeypatch.setattr("composer.recipes._monitors.time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    (each,) = run(tiny(algorithms=(clock,), epochs=epochs), replace(one, eval_interval=interval)).runs

    assert expected == each.tested_at
    assert total == each.train_seconds
    assert 20 * total == each.samples
    assert [len(expected)] * 2 == [len(scores) for scores in each.scores.values()]


def test_an_evaluation_that_sleeps_is_not_counted(tiny: Make, one: Runs) -> None:
    (each,) = run(tiny(algorithms=(Sleeper(),)), replace(one, eval_interval="2ba")).runs

    assert 3 * 0.3 <= each.seconds - each.train_seconds
    assert 3 == len(each.tested_at)
    assert 0 < each.tested_at[0] <= each.tested_at[1] <= each.tested_at[2] <= each.train_seconds


def test_a_shortened_run_is_tested_at_its_end(tiny: Make, one: Runs) -> None:
    (full,) = run(tiny(epochs=4), one).runs
    (half,) = run(tiny(algorithms=(ScaleSchedule(0.5),), epochs=4), one).runs

    assert (240, 4) == (full.samples, len(full.tested_at))
    assert (120, 2) == (half.samples, len(half.tested_at))
