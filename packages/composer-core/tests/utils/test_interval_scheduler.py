"""When an interval has passed."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import Event, State, Time
from composer.utils import create_interval_scheduler

Schedule = Callable[[State, Event], bool]


def make_state(max_duration: str | None, batches_per_epoch: int = 5) -> State:
    return State(
        model=torch.nn.Linear(1, 1),
        rank_zero_seed=0,
        max_duration=max_duration,
        dataloader=[torch.zeros(2, 1)] * batches_per_epoch,
    )


def train(
    state: State, schedule: Schedule, seconds: float = 1.0, samples: int = 2, epochs_per_iteration: int = 10**9
) -> list[tuple[str, int]]:
    """The events of a loop at which `schedule` is True, with the batch count."""
    fired: list[tuple[str, int]] = []
    state._iteration_length = f"{epochs_per_iteration}ep"  # type: ignore[assignment]
    assert state.dataloader_len is not None
    assert state.max_duration is not None

    def announce(*events: Event) -> None:
        fired.extend((event.name, state.timestamp.batch.value) for event in events if schedule(state, event))

    def advance(timestamp: Any) -> None:
        state.previous_timestamp, state.timestamp = state.timestamp, timestamp

    announce(Event.INIT, Event.FIT_START)
    while state.timestamp < state.max_duration:
        for _ in range(state.dataloader_len.value):
            announce(Event.BATCH_START)
            advance(state.timestamp.to_next_batch(samples, samples * 10, timedelta(seconds=seconds)))
            announce(Event.BATCH_END, Event.BATCH_CHECKPOINT)
            if state.timestamp >= state.max_duration:
                break
        if state.timestamp.batch_in_epoch == state.dataloader_len:
            advance(state.timestamp.to_next_epoch())
            announce(Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
            if state.timestamp.epoch_in_iteration.value == epochs_per_iteration:
                advance(state.timestamp.to_next_iteration())
                announce(Event.ITERATION_END, Event.ITERATION_CHECKPOINT)
    announce(Event.FIT_END)
    return fired


@pytest.mark.parametrize(
    ("interval", "max_duration", "expected"),
    [
        (1, "5ep", 5),
        ("2ep", "8ep", 4),
        ("10ba", "8ep", 4),
        ("0.25dur", "4ep", 4),
        ("5ba", "10ba", 2),
        ("0.35dur", "4ep", 3),
        ("0.01dur", "100ba", 100),
        ("0.10dur", "70sp", 10),
        ("0.05dur", "80sp", 20),
        ("0.1dur", "30ba", 10),
        ("10sp", "80sp", 8),
        ("7sp", "20sp", 3),
        ("100tok", "200tok", 2),
        ("30tok", "100tok", 3),
        ("0.5dur", "200tok", 2),
        ("3sec", "10ba", 4),
    ],
)
def test_number_of_checkpoints_of_a_run(interval: str | int, max_duration: str, expected: int) -> None:
    fired = train(make_state(max_duration), create_interval_scheduler(interval))

    assert expected == len(fired)
    assert len({batch for _, batch in fired}) == len(fired)


def test_iterations_are_counted_at_their_own_event() -> None:
    schedule = create_interval_scheduler(Time(2, "iter"), include_end_of_training=False)

    fired = train(make_state("8ep"), schedule, epochs_per_iteration=2)

    assert [("ITERATION_CHECKPOINT", 20), ("ITERATION_CHECKPOINT", 40)] == fired


@pytest.mark.parametrize(
    ("interval", "checkpoint_events", "expected"),
    [
        ("1ep", True, "EPOCH_CHECKPOINT"),
        ("1ep", False, "EPOCH_END"),
        ("1iter", True, "ITERATION_CHECKPOINT"),
        ("1iter", False, "ITERATION_END"),
        *[(f"1{unit}", True, "BATCH_CHECKPOINT") for unit in ("ba", "sp", "tok", "sec")],
        *[(f"1{unit}", False, "BATCH_END") for unit in ("ba", "sp", "tok", "sec")],
        ("0.1dur", True, "BATCH_CHECKPOINT"),
        ("0.1dur", False, "BATCH_END"),
    ],
)
def test_each_unit_has_its_event(interval: str, checkpoint_events: bool, expected: str) -> None:
    schedule = create_interval_scheduler(interval, False, checkpoint_events)

    fired = train(make_state("2ep"), schedule, epochs_per_iteration=1)

    assert {expected} == {event for event, _ in fired}


@pytest.mark.parametrize(("seconds", "interval", "expected"), [(10.0, "10sec", 5), (1.0, "20sec", 0), (1.0, "2sec", 2)])
def test_wall_clock_time_is_counted_in_full_seconds(seconds: float, interval: str, expected: int) -> None:
    schedule = create_interval_scheduler(interval, include_end_of_training=False)

    assert expected == len(train(make_state("1ep"), schedule, seconds))


@pytest.mark.parametrize(("interval", "expected"), [("0.25dur", [2, 4, 6, 8]), ("0.1dur", [1, 2, 3, 4, 5, 6, 7, 8])])
def test_fractions_of_a_run_in_seconds_are_not_rounded(interval: str, expected: list[int]) -> None:
    fired = train(make_state("2sec"), create_interval_scheduler(interval), seconds=0.25)

    assert expected == [batch for _, batch in fired]


def test_fractions_of_a_run_of_seconds_need_no_length_of_the_dataloader() -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="2sec", rank_zero_seed=0, dataloader=iter(()))
    schedule = create_interval_scheduler("0.5dur")
    answers = []
    for _ in range(4):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(duration=timedelta(seconds=0.5))
        answers.append(schedule(state, Event.BATCH_CHECKPOINT))

    assert [False, True, False, True] == answers


def test_a_run_of_seconds_may_be_stopped_within_the_first() -> None:
    state = make_state("100sec")
    schedule = create_interval_scheduler("0.1dur")
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(duration=timedelta(seconds=0.5))
    state.stop_training()

    assert schedule(state, Event.BATCH_CHECKPOINT)


@pytest.mark.parametrize("interval", [0, "0ep", "0ba", "0dur", Time(-1, "ba"), Time(-0.5, "dur")])
def test_an_interval_that_is_not_positive_never_passes(interval: Any) -> None:
    assert [] == train(make_state("2ep"), create_interval_scheduler(interval))


def test_nothing_has_passed_before_the_first_batch() -> None:
    state = make_state("1ba")
    state.timestamp = state.timestamp.copy(batch=10, epoch=10)

    assert not create_interval_scheduler("1ba")(state, Event.BATCH_CHECKPOINT)


def test_the_end_of_training_counts_once_unless_it_just_did() -> None:
    assert [("BATCH_CHECKPOINT", 4), ("BATCH_CHECKPOINT", 7)] == train(
        make_state("7ba"), create_interval_scheduler("4ba")
    )
    assert [("BATCH_CHECKPOINT", 4), ("BATCH_CHECKPOINT", 8)] == train(
        make_state("8ba"), create_interval_scheduler("4ba")
    )
    assert [("EPOCH_CHECKPOINT", 10), ("EPOCH_CHECKPOINT", 15)] == train(
        make_state("3ep"), create_interval_scheduler("2ep")
    )


def test_a_second_call_at_the_same_event_returns_the_same() -> None:
    schedule = create_interval_scheduler("4ba")

    assert [("BATCH_CHECKPOINT", 4), ("BATCH_CHECKPOINT", 7)] == train(
        make_state("7ba"), lambda state, event: schedule(state, event) and schedule(state, event)
    )


def test_the_end_of_training_can_be_left_out() -> None:
    schedule = create_interval_scheduler("4ba", include_end_of_training=False)

    assert [("BATCH_CHECKPOINT", 4)] == train(make_state("7ba"), schedule)


def test_the_end_of_training_is_noticed_at_the_final_events() -> None:
    schedule = create_interval_scheduler("2ep", checkpoint_events=False, final_events={Event.FIT_END})

    assert [("EPOCH_END", 10), ("FIT_END", 15)] == train(make_state("3ep"), schedule)


def test_a_run_without_a_length_has_no_end() -> None:
    state = make_state(None)
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(2)

    assert not create_interval_scheduler("2ba")(state, Event.BATCH_CHECKPOINT)
    assert create_interval_scheduler("1ba")(state, Event.BATCH_CHECKPOINT)


def test_two_schedules_do_not_share_what_they_remember() -> None:
    state = make_state("1ba", batches_per_epoch=3)
    first, second = create_interval_scheduler("9ba"), create_interval_scheduler("9ba")
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(2)

    assert first(state, Event.BATCH_CHECKPOINT)
    assert not first(state, Event.EPOCH_CHECKPOINT)
    assert second(state, Event.EPOCH_CHECKPOINT)


@pytest.mark.parametrize(("interval", "expected"), [(3, Time(3, "ep")), ("0.5dur", Time(0.5, "dur"))])
def test_the_interval_can_be_read_from_the_closure(interval: Any, expected: Time[Any]) -> None:
    closure = create_interval_scheduler(interval).__closure__  # type: ignore[attr-defined]

    assert expected == closure[-1].cell_contents


def test_a_fraction_of_a_run_needs_its_length() -> None:
    unlimited, unsized = make_state(None), make_state("2ep")
    unsized.set_dataloader((x for x in range(3)), "train")
    schedule = create_interval_scheduler("0.5dur", include_end_of_training=False)

    for state, what in ((unlimited, "run"), (unsized, "dataloader")):
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(2)
        with pytest.raises(RuntimeError, match=f"got '0.5dur', because the length of the {what} is not known"):
            schedule(state, Event.BATCH_CHECKPOINT)


@settings(deadline=None, max_examples=30)
@given(
    unit=st.sampled_from(["ba", "sp", "tok"]),
    interval=st.integers(1, 60),
    batches=st.integers(1, 12),
    samples=st.integers(1, 4),
)
def test_a_count_passes_every_multiple_of_the_interval_and_the_end(
    unit: str, interval: int, batches: int, samples: int
) -> None:
    fired = train(make_state(f"{batches}ba"), create_interval_scheduler(f"{interval}{unit}"), samples=samples)

    per_batch = {"ba": 1, "sp": samples, "tok": 10 * samples}[unit]
    multiples = {math.ceil(Fraction(n * interval, per_batch)) for n in range(1, batches * per_batch // interval + 1)}
    assert sorted(multiples | {batches}) == [batch for _, batch in fired]


@settings(deadline=None, max_examples=30)
@given(percent=st.integers(1, 100), epochs=st.integers(1, 4), length=st.integers(1, 6))
def test_a_fraction_of_epochs_is_a_number_of_batches_rounded_up(percent: int, epochs: int, length: int) -> None:
    schedule = create_interval_scheduler(f"{percent / 100}dur", include_end_of_training=False)

    fired = train(make_state(f"{epochs}ep", length), schedule)

    total = epochs * length
    step = math.ceil(Fraction(percent, 100) * total)
    assert list(range(step, total + 1, step)) == [batch for _, batch in fired]
