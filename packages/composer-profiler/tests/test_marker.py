from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.core import State
from composer.profiler import Profiler, ProfilerAction, TraceHandler


class Recorder(TraceHandler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.times: list[int] = []

    def process_duration_event(
        self, name: str, categories: Any, is_start: bool, timestamp: Any, wall_clock_time_ns: int
    ) -> None:
        self.calls.append(("B" if is_start else "E", name, *categories))
        self.times.append(wall_clock_time_ns)

    def process_instant_event(self, name: str, categories: Any, timestamp: Any, wall_clock_time_ns: int) -> None:
        self.calls.append(("i", name, *categories))
        self.times.append(wall_clock_time_ns)

    def process_counter_event(
        self, name: str, categories: Any, timestamp: Any, wall_clock_time_ns: int, values: Any
    ) -> None:
        self.calls.append(("C", name, *categories, dict(values)))
        self.times.append(wall_clock_time_ns)


class Fixed:
    """A schedule whose action can be set."""

    def __init__(self) -> None:
        self.action = ProfilerAction.ACTIVE

    def __call__(self, state: State) -> ProfilerAction:
        return self.action


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def schedule() -> Fixed:
    return Fixed()


@pytest.fixture
def profiler(schedule: Fixed, recorder: Recorder) -> Profiler:
    profiler = Profiler(schedule, recorder)
    profiler.bind_to_state(State(model=torch.nn.Linear(1, 1)))
    return profiler


def test_starts_and_ends_are_recorded_in_order(profiler: Profiler, recorder: Recorder) -> None:
    marker = profiler.marker("work", actions=list(ProfilerAction), categories=["a", "b"])
    for _ in range(4):
        marker.start()
        marker.finish()

    assert recorder.calls == [("B", "work", "a", "b"), ("E", "work", "a", "b")] * 4
    assert recorder.times == sorted(recorder.times)


def test_a_span_is_recorded_completely_or_not_at_all(profiler: Profiler, recorder: Recorder, schedule: Fixed) -> None:
    marker = profiler.marker("work")
    marker.start()
    schedule.action = ProfilerAction.SKIP
    marker.finish()
    marker.start()
    schedule.action = ProfilerAction.ACTIVE
    marker.finish()

    assert recorder.calls == [("B", "work"), ("E", "work")]


@pytest.mark.parametrize("action", ProfilerAction)
def test_the_actions_decide(profiler: Profiler, recorder: Recorder, schedule: Fixed, action: ProfilerAction) -> None:
    schedule.action = action
    with profiler.marker("named", actions=[action.value]):
        profiler.marker("other", actions=[a for a in ProfilerAction if a is not action]).instant()
        profiler.marker("default").instant()

    names = [name for kind, name in recorder.calls if kind != "E"]
    assert names == ["named", *(["default"] if action is not ProfilerAction.SKIP else [])]


def test_what_is_not_started_cannot_be_finished_and_the_other_way_round(profiler: Profiler) -> None:
    marker = profiler.marker("work")
    with pytest.raises(RuntimeError, match="'work' is not started"):
        marker.finish()
    marker.start()
    with pytest.raises(RuntimeError, match="'work' is already started"):
        marker.start()


def test_instants_and_counters(profiler: Profiler, recorder: Recorder, schedule: Fixed) -> None:
    marker = profiler.marker("work", record_instant_on_start=True, record_instant_on_finish=True, categories=["c"])
    with marker:
        marker.instant()
        marker.counter({"used": 1, "free": 2.5})
    schedule.action = ProfilerAction.SKIP
    marker.counter({"used": 2})

    calls = [(call[0], *call[3:]) for call in recorder.calls]
    assert calls == [("B",), ("i",), ("i",), ("C", {"used": 1, "free": 2.5}), ("E",), ("i",)]


def test_both_decorators_keep_what_the_function_returns(profiler: Profiler, recorder: Recorder) -> None:
    @profiler.marker("plain")
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    @profiler.marker("called")()
    def count_down(n: int) -> int:
        return n and count_down(n - 1)

    assert (double(3), double.__doc__, count_down(2)) == (6, "Twice.", 0)
    assert recorder.calls == [("B", "plain"), ("E", "plain"), ("B", "called"), ("E", "called")]


def test_an_error_ends_the_span(profiler: Profiler, recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), profiler.marker("work"):
        _ = 1 / 0

    assert recorder.calls == [("B", "work"), ("E", "work")]


def test_the_same_name_is_the_same_marker(profiler: Profiler) -> None:
    assert profiler.marker("a") is profiler.marker("a")
    assert profiler.marker("a") is not profiler.marker("b")


def test_handlers_can_be_exchanged(profiler: Profiler, recorder: Recorder) -> None:
    other = Recorder()
    profiler.trace_handlers = other
    profiler.marker("a").instant()

    assert (recorder.calls, other.calls, profiler.trace_handlers) == ([], [("i", "a")], [other])


def test_a_profiler_must_be_bound(schedule: Fixed) -> None:
    with pytest.raises(RuntimeError, match="not bound to a run"):
        Profiler(schedule, []).marker("work")


def test_a_handler_of_ones_own_needs_to_override_nothing(schedule: Fixed) -> None:
    profiler = Profiler(schedule, TraceHandler())
    profiler.bind_to_state(State(model=torch.nn.Linear(1, 1)))
    marker = profiler.marker("work")
    with marker:
        marker.instant()
        marker.counter({"a": 1})
    profiler.record_chrome_json_trace_file("nowhere.json")
