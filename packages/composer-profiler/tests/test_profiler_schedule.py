from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerAction as TorchAction

from composer.core import Engine, State, Timestamp
from composer.profiler import Profiler, ProfilerAction, TorchProfiler, cyclic_schedule


def actions(schedule: Any, batches: int, length: int | None = None, resumed: int = 0) -> list[str]:
    state: Any = SimpleNamespace(
        dataloader_len=None if length is None else SimpleNamespace(value=length),
        profiler=SimpleNamespace(resumption_batch_idx=resumed),
    )
    found = []
    for batch in range(batches):
        state.timestamp = Timestamp(batch_in_epoch=batch)
        found.append(schedule(state).value)
    return found


def test_a_cycle_waits_warms_up_records_and_saves() -> None:
    schedule = cyclic_schedule(skip_first=1, wait=2, warmup=1, active=2, repeat=2)

    cycle = ["skip", "skip", "warmup", "active", "active_and_save"]
    assert actions(schedule, 13) == ["skip", *cycle, *cycle, "skip", "skip"]


def test_the_last_batch_of_an_epoch_is_saved_if_it_is_recorded() -> None:
    assert actions(cyclic_schedule(warmup=0, active=1000, repeat=0), 3, 3) == ["active", "active", "active_and_save"]
    assert actions(cyclic_schedule(warmup=3, active=2), 3, 3) == ["warmup", "warmup", "warmup"]


def test_the_defaults() -> None:
    assert actions(cyclic_schedule(), 7) == ["warmup", "active", "active", "active", "active_and_save", "skip", "skip"]


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_it_agrees_with_writing_the_batches_out(
    skip_first: int, wait: int, warmup: int, active: int, repeat: int, resumed: int
) -> None:
    cycle = ["skip"] * wait + ["warmup"] * warmup + ["active"] * (active - 1) + ["active_and_save"]
    cycles = cycle * (repeat or 50)
    expected = (["skip"] * (resumed + skip_first) + cycles + ["skip"] * 40)[:40]

    schedule = cyclic_schedule(skip_first, wait, warmup, active, repeat)

    assert actions(schedule, 40, resumed=resumed) == expected


@pytest.mark.parametrize(
    ("argument", "least"), [("skip_first", 0), ("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0)]
)
def test_numbers_that_cannot_work(argument: str, least: int) -> None:
    for value in (least - 1, 1.5, True):
        with pytest.raises(ValueError, match=f"`{argument}` must be .*at least {least}, got {value}"):
            cyclic_schedule(**{argument: value})


def test_it_works_without_a_profiler() -> None:
    state = State(model=torch.nn.Linear(1, 1))

    assert cyclic_schedule(warmup=0)(state) is ProfilerAction.ACTIVE


@pytest.mark.parametrize(("resumed_at", "expected"), [(0, TorchAction.RECORD), (4, TorchAction.WARMUP)])
def test_batches_are_skipped_from_where_a_run_is_resumed(resumed_at: int, expected: TorchAction) -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=range(100))
    profiler = Profiler(cyclic_schedule(skip_first=1, wait=2, warmup=3, active=4), [])
    profiler.bind_to_state(state)
    engine = Engine(state)
    engine.run_event("init")
    state.timestamp = Timestamp(batch=resumed_at, batch_in_epoch=resumed_at)
    engine.run_event("after_load")

    state.timestamp = Timestamp(batch=7, batch_in_epoch=7)
    (torch_profiler,) = (callback for callback in state.callbacks if isinstance(callback, TorchProfiler))
    assert torch_profiler.profiler is not None
    assert torch_profiler.profiler.schedule(0) is expected
    engine.close()


def test_only_the_epoch_that_is_resumed_is_counted_from_there() -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="9ep", dataloader=range(100))
    profiler = Profiler(cyclic_schedule(skip_first=1, warmup=0), [])
    profiler.bind_to_state(state)
    state.timestamp = Timestamp(batch=4, batch_in_epoch=4)
    engine = Engine(state)
    for event in ("init", "after_load"):
        engine.run_event(event)
    first = profiler.schedule(state)
    state.timestamp = Timestamp(epoch=1, batch=100, batch_in_epoch=1)
    engine.run_event("epoch_start")

    assert (first, profiler.schedule(state)) == (ProfilerAction.SKIP, ProfilerAction.ACTIVE)
    engine.close()
