"""`ScaleSchedule` in a run, with the engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from composer.algorithms.scale_schedule import ScaleSchedule
from composer.core import Engine, State, Time


def make(algorithm: ScaleSchedule, max_duration: str | None = "10ep", scheduled: bool = True) -> State:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return State(
        model=model,
        max_duration=max_duration,
        dataloader=[0],
        optimizers=optimizer,
        schedulers=StepLR(optimizer, 4) if scheduled else None,
        algorithms=algorithm,
    )


def lengths_of(state: State) -> tuple[Any, ...]:
    return (str(state.max_duration), *(scheduler.step_size for scheduler in state.schedulers))


@pytest.mark.parametrize(
    ("ratio", "duration", "expected"),
    [
        (0.5, "10ep", ("5ep", 2)),
        (2.0, "10ba", ("20ba", 8)),
        (1.5, "7sp", ("10sp", 6)),
        (1.0, "10ep", ("10ep", 4)),
        (0.25, "100tok", ("25tok", 1)),
    ],
)
def test_the_run_and_its_schedules_are_scaled_at_init(ratio: float, duration: str, expected: tuple[Any, ...]) -> None:
    state = make(ScaleSchedule(ratio), duration)
    Engine(state).run_event("init")

    assert expected == lengths_of(state)


def test_each_is_scaled_once_however_often_the_events_occur() -> None:
    state = make(ScaleSchedule(0.5))
    for engine in (Engine(state), Engine(state)):
        for event in ("init", "before_load", "fit_start", "fit_start"):
            engine.run_event(event)

    assert ("5ep", 2) == lengths_of(state)


def test_schedulers_added_after_init_are_scaled() -> None:
    """A Trainer knows the length of the run and its schedules later than INIT, sometimes only when it fits."""
    state = make(ScaleSchedule(0.5), None, scheduled=False)
    engine = Engine(state)
    engine.run_event("init")
    state.max_duration = "10ep"
    engine.run_event("before_load")
    assert Time.from_epoch(5) == state.max_duration
    state.schedulers = [StepLR(state.optimizers[0], 4)]
    engine.run_event("fit_start")

    assert ("5ep", 2) == lengths_of(state)


def test_schedulers_added_after_the_start_are_not_scaled() -> None:
    state = make(ScaleSchedule(0.5), scheduled=False)
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("fit_start")
    state.max_duration = "12ep"
    state.schedulers = [StepLR(state.optimizers[0], 4)]
    engine.run_event("fit_start")

    assert ("12ep", 4) == lengths_of(state)


def test_a_resumed_run_has_the_lengths_of_the_first() -> None:
    first = make(ScaleSchedule(0.5))
    Engine(first).run_event("init")
    saved = copy.deepcopy(first.state_dict())
    resumed = make(ScaleSchedule(0.5))
    engine = Engine(resumed)
    for event in ("init", "before_load"):
        engine.run_event(event)
    resumed.load_state_dict(saved)
    for event in ("after_load", "fit_start"):
        engine.run_event(event)

    assert ("5ep", 2) == lengths_of(first) == lengths_of(resumed)


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_another_run_is_scaled_too(copied: Any) -> None:
    algorithm = ScaleSchedule(0.5)
    first = make(algorithm)
    Engine(first).run_event("init")
    second = make(copied(algorithm))
    Engine(second).run_event("init")

    assert ("5ep", 2) == lengths_of(second)


def test_schedules_see_the_scaled_length() -> None:
    class Own:
        def scale_schedule(self, ssr: float) -> None:
            self.seen = str(state.max_duration), ssr

    state = make(ScaleSchedule(0.5), scheduled=False)
    own = Own()
    state.schedulers = [own]
    Engine(state).run_event("init")

    assert ("5ep", 0.5) == own.seen


def test_a_ratio_that_leaves_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`ratio` must not scale the run to nothing, got 0\.01 for .* '10ep'"):
        Engine(make(ScaleSchedule(0.01))).run_event("init")


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`ratio` must be positive, got 0"):
        ScaleSchedule(0)
    with pytest.raises(NotImplementedError, match=r"`method` 'samples' is not implemented"):
        ScaleSchedule(0.5, "samples")
    with pytest.raises(ValueError, match=r"`method` must be 'epoch', got 'batch'"):
        ScaleSchedule(0.5, "batch")
