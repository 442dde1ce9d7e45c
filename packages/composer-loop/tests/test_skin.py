"""The adapters of all hosts refuse, count and name hooks in the same way."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from composer.core import (
    AVERAGES_WEIGHTS,
    REPLACES_MODEL,
    SWAPS_WEIGHTS,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Placement,
    State,
    Timestamp,
)
from composer.loggers import Logger
from composer.loop import HostedRun
from composer.loop.refusals import UNAVAILABLE, conflicts, raise_all
from composer.loop.skin import duration, hooks_by_event, uncounted, wrap


class Replacing(Algorithm):
    """Replaces the model."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_MODEL})

    def apply(self, *args: Any) -> None: ...


class OfTheLoss(Algorithm):
    """Acts around the loss."""

    events = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})

    def apply(self, *args: Any) -> None: ...


class Averaging(OfTheLoss):
    """Excludes itself and others that swap weights."""

    placement = Placement(provides={AVERAGES_WEIGHTS}, excludes={AVERAGES_WEIGHTS, SWAPS_WEIGHTS})


class Swapping(OfTheLoss):
    """Excludes averages, which exclude it, too."""

    placement = Placement(provides={SWAPS_WEIGHTS}, excludes={AVERAGES_WEIGHTS})


def test_everything_that_a_host_cannot_do_is_told_at_once_and_each_reason_once() -> None:
    unavailable = {**UNAVAILABLE, **dict.fromkeys((Event.BEFORE_LOSS, Event.AFTER_LOSS), "Pass `loss`.")}
    found = [str(each) for each in conflicts([Replacing(), OfTheLoss()], unavailable)]

    assert ["Pass the model that you want to train.", "Pass `loss`."] == [each.partition(". ")[2] for each in found]
    with pytest.raises(ConflictError, match=r"(?s)2 problems.*`Replacing` .*`OfTheLoss` acts at BEFORE_LOSS"):
        HostedRun(torch.nn.Identity(), [Replacing(), OfTheLoss()], max_duration="1ep", unavailable=unavailable)


class Watching(Callback):
    """Reads the loss."""

    def after_loss(self, state: State, logger: Logger) -> None: ...


def test_callbacks_that_act_on_losses_are_refused_in_a_manual_loop() -> None:
    settings: dict[str, Any] = {"max_duration": "1ep", "callbacks": Watching()}
    with pytest.raises(ConflictError, match=r"(?s)2 problems.*`accumulate`.*`Watching` acts at AFTER_LOSS, which this"):
        HostedRun(torch.nn.Identity(), manual=True, accumulate=2, **settings)
    run = HostedRun(torch.nn.Identity(), **settings)
    with pytest.raises(ConflictError, match="`Watching` acts at AFTER_LOSS"):
        run.reconfigure(manual=True)


def test_settings_and_conflicts_are_one_error() -> None:
    raise_all([])
    with pytest.raises(ValueError, match=r"^one$") as caught:
        raise_all(["one"])
    assert not isinstance(caught.value, ConflictError)
    with pytest.raises(ConflictError, match=r"(?s)2 problems.*\n- one\n- two"):
        raise_all(["one", ConflictError("two")])
    with pytest.raises(TypeError, match=r"(?s)2 problems.*\n- one\n- two"):
        raise_all([TypeError("one"), TypeError("two")])


def test_everything_that_is_wrong_with_the_arguments_of_a_run_is_told_at_once() -> None:
    settings: dict[str, Any] = {
        "forward": "forward",
        "max_duration": "1 year",
        "precision": "fp7",
        "accumulate": 0,
        "seed": "zero",
        "callbacks": "tqdm",
        "loggers": print,
        "schedulers": [3],
        "optimizers": "adam",
        "dataloader": torch.zeros(2, 2),
    }
    words = [
        *settings.keys() - {"precision"},
        "Precision",
        "model",
        "algorithms",
        "`Replacing` replaces",
        "Use another host.",
    ]
    wrong: Any = [3, Replacing()]
    with pytest.raises(ConflictError) as caught:
        HostedRun("net", wrong, **settings, unavailable=UNAVAILABLE, problems=["Use another host."])  # type: ignore[arg-type]

    lines = str(caught.value).splitlines()
    assert f"{len(words) + 1} problems must be solved before training:" == lines[0]  # `forward` also lacks `loss`
    assert [] == [word for word in words if word not in str(caught.value)]


def test_all_pairs_that_exclude_each_other_are_told() -> None:
    found = [str(each) for each in conflicts([Averaging(), Averaging(), Swapping()], {})]

    assert 3 == len(found)
    assert ["given twice", "`Swapping`, which", "`Swapping`, which"] == [
        next(word for word in ("given twice", "`Swapping`, which") if word in each) for each in found
    ]


def test_each_event_has_the_last_hook_before_it() -> None:
    table = hooks_by_event(INIT="setup", EPOCH_START="start", EVAL_BATCH_START="", EVAL_END="end")

    assert (table[Event.FIT_START], table[Event.BATCH_START], table[Event.EVAL_END]) == ("setup", "start", "end")
    assert Event.EVAL_BEFORE_FORWARD not in table
    assert Event.PREDICT_START not in table


def test_an_interrupted_epoch_is_over_for_a_host_that_begins_a_new_one() -> None:
    middle = Timestamp().to_next_batch(8).to_next_epoch().to_next_batch(8)

    assert (2, 2) == uncounted(middle, 0, 0)
    assert (1, 0) == uncounted(middle.to_next_epoch(), 1, 2)
    assert ("9ba", "4ep", "3ep") == (duration(7, 1, (2, 2)), duration(-1, 2, (2, 2)), duration(0, 2.5))


def test_wrapped_methods_are_put_back() -> None:
    class Host:
        def step(self, size: int) -> int:
            return size

    host = Host()
    undo = wrap(host, "step", lambda original, size: original(size) + 1)
    again = wrap(host, "step", lambda original, size: original(size) * 2)
    assert ["size"] == list(inspect.signature(host.step).parameters)
    assert host.step(1) == 4
    again()
    assert host.step(1) == 2
    undo()
    assert host.step(1) == 1
    assert not vars(host)
