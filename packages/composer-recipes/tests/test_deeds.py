from __future__ import annotations

from collections.abc import Callable

import pytest

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.recipes import Data, Recipe, Result, Runs, Training, digits, run

ONE = Runs(seeds=1, device="cpu", progress=False)


class Counter(Algorithm):
    events = frozenset({Event.FIT_START, Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Idle(Counter):
    def match(self, event: Event, state: State) -> bool:
        return False


@pytest.fixture(scope="module")
def result() -> Result:
    """All algorithms in 3 epochs of 4 batches, with a network of 16 channels."""
    arguments = {**digits.TUNED, "ema": {"half_life": "4ba", "update_interval": "2ba"}, "sam": {"interval": 3}}
    algorithms = digits.make_algorithms(list(digits.ALGORITHMS), arguments)
    recipe = digits.composed(
        Data(train_samples=80, test_samples=20, batch_size=20),
        training=Training(epochs=3),
        algorithms=algorithms,
    )
    return run(recipe, ONE)


@pytest.mark.parametrize(
    ("name", "deed"),
    [
        ("BlurPool", "put a blur into 4 strided convolutions and 0 max poolings"),
        ("ChannelsLast", "stored 9 of 9 convolutions channels last"),
        ("EMA", "averaged the weights 6 times, tested the averages 3 times"),
        ("LabelSmoothing", "smoothed the targets of 16 passes"),  # 12 batches, 4 of them twice for SAM
        ("MixUp", "mixed the images of 16 passes in pairs"),
        ("ProgressiveResizing", "trained 7 batches at 8x8, 2 batches at 12x12, 3 batches at 16x16"),
        ("SAM", "looked for the worst point nearby in 4 of 12 steps"),
    ],
)
def test_deeds_are_told_with_the_counts_of_the_run(result: Result, name: str, deed: str) -> None:
    assert deed == result.runs[0].deeds[name]


def test_passes_are_called_batches_where_each_batch_has_one(tiny: Callable[..., Recipe]) -> None:
    algorithms = digits.make_algorithms(["mixup", "label_smoothing"])

    deeds = run(tiny(algorithms=tuple(algorithms)), ONE).runs[0].deeds

    assert deeds == {
        "MixUp": "mixed the images of 6 batches in pairs",
        "LabelSmoothing": "smoothed the targets of 6 batches",
    }


def test_an_algorithm_of_ones_own_is_counted_event_by_event(tiny: Callable[..., Recipe]) -> None:
    deeds = run(tiny(algorithms=(Counter(), Idle())), ONE).runs[0].deeds

    assert deeds == {"Counter": "acted 1 time at fit_start, 6 times at batch_end", "Idle": "did nothing"}


def test_the_plan_lists_algorithms_and_nothing_that_only_watches(result: Result) -> None:
    assert all(name in result.plan for name in result.runs[0].deeds)
    assert "logger" not in result.plan
    assert "callback" not in result.plan
