"""The sections of events, algorithms and callbacks that the engine passes to a profiler, properly nested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.core import Algorithm, Callback, Engine, Event, State
from composer.loggers import Logger, LoggerDestination


class Profiler:
    """Records what its markers are told. A marker refuses what a real one refuses."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.made: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {}
        self.markers: dict[str, Marker] = {}

    def marker(
        self,
        name: str,
        actions: Any = None,
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Any = (),
    ) -> Marker:
        self.made[name] = (None if actions is None else tuple(actions), tuple(categories))
        return self.markers.setdefault(name, Marker(name, self.calls))


class Marker:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.started = name, calls, False

    def start(self) -> None:
        assert not self.started, self.name
        self.started = True
        self.calls.append(f"<{self.name}")

    def finish(self) -> None:
        assert self.started, self.name
        self.started = False
        self.calls.append(f"{self.name}>")


class Act(Algorithm):
    events = frozenset({Event.INIT, Event.BATCH_START, Event.BATCH_END})

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        self.calls.append("apply")
        return 3


class Watch(Callback):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def batch_start(self, state: State, logger: Logger) -> None:
        self.calls.append("watch")

    def batch_end(self, state: State, logger: Logger) -> None:
        self.calls.append("watch")


class Log(LoggerDestination):
    def batch_end(self, state: State, logger: Logger) -> None:
        pass


@pytest.fixture
def profiler() -> Profiler:
    return Profiler()


def make_engine(profiler: Profiler | None, *callbacks: Callback, algorithms: Any = ()) -> Engine:
    state = State(
        model=torch.nn.Linear(1, 1),
        max_duration="1ep",
        dataloader=[0],
        callbacks=callbacks,
        algorithms=algorithms,
    )
    state.profiler = profiler
    return Engine(state)


def assert_nested(calls: list[str]) -> None:
    """Whatever begins ends, and what began last ends first."""
    opened: list[str] = []
    for call in calls:
        if call.startswith("<"):
            opened.append(call[1:])
        elif call.endswith(">"):
            assert opened.pop() == call[:-1]
    assert opened == []


def test_a_pair_of_events_is_marked_between_its_two_ends(profiler: Profiler) -> None:
    calls = profiler.calls
    engine = make_engine(profiler, Watch(calls), Log(), algorithms=Act(calls))
    traces = engine.run_event("batch_start")
    engine.run_event(Event.BATCH_END)

    def marked(kind: str, event: str, *inside: str) -> list[str]:
        return [f"<{kind}/event/{event}", *inside, f"{kind}/event/{event}>"]

    assert calls == [
        *marked("algorithm/Act", "batch_start", "apply"),
        *marked("callback/Watch", "batch_start", "watch"),
        "<event/batch",
        "event/batch>",
        *marked("algorithm/Act", "batch_end", "apply"),
        *marked("callback/Watch", "batch_end", "watch"),
        *marked("callback/Log", "batch_end"),
    ]
    (trace,) = traces.values()
    assert (trace.name, trace.exit_code, trace.order, trace.run) == ("Act", 3, 0, True)
    assert profiler.made["algorithm/Act/event/batch_end"] == (None, ("batch_end", "Act"))
    assert profiler.made["callback/Log/event/batch_end"] == (None, ("batch_end", "Log"))


def test_events_without_actors_are_marked(profiler: Profiler) -> None:
    engine = make_engine(profiler)
    for event in Event:
        engine.run_event(event)
    engine.run_event("fit_end")

    assert_nested(profiler.calls)
    pairs = {event.canonical_name for event in Event if event.is_before_event}
    assert {call[1:] for call in profiler.calls if call.startswith("<")} == {f"event/{name}" for name in pairs}


def test_init_is_no_pair_but_its_callbacks_are_marked(profiler: Profiler) -> None:
    make_engine(profiler, algorithms=Act(profiler.calls)).run_event("init")

    assert profiler.calls == ["<algorithm/Act/event/init", "apply", "algorithm/Act/event/init>"]


@pytest.mark.parametrize("event", [event for event in Event if event.is_before_event])
def test_rare_events_are_recorded_while_batches_are_skipped(profiler: Profiler, event: Event) -> None:
    make_engine(profiler).run_event(event)
    actions, categories = profiler.made[f"event/{event.canonical_name}"]

    skipped = ("skip",) if event in (Event.FIT_START, Event.EPOCH_START) else ()
    assert (actions, categories) == ((*skipped, "warmup", "active", "active_and_save"), ())


def test_an_exhausted_loader_only_ends_the_marker(profiler: Profiler) -> None:
    engine = make_engine(profiler, _Counting())
    engine.run_event("before_dataloader")
    engine.run_marker_only_event("after_dataloader")
    engine.run_marker_only_event(Event.AFTER_DATALOADER)
    engine.run_marker_only_event(Event.INIT)

    assert profiler.calls == ["<event/dataloader", "event/dataloader>"]


def test_only_a_marker_can_begin_too(profiler: Profiler) -> None:
    engine = make_engine(profiler)
    engine.run_marker_only_event("fit_start")
    engine.run_event("fit_end")

    assert profiler.calls == ["<event/fit", "event/fit>"]


def test_a_marker_only_event_without_a_profiler_does_nothing() -> None:
    engine = make_engine(None, _Counting())
    engine.run_marker_only_event("after_dataloader")
    with pytest.raises(ValueError, match="`Event` must be one of"):
        engine.run_marker_only_event("lunch")


class _Counting(Callback):
    def after_dataloader(self, state: State, logger: Logger) -> None:
        raise AssertionError("there was no batch")


def test_what_a_loop_leaves_open_ends_with_what_it_is_in(profiler: Profiler) -> None:
    engine = make_engine(profiler)
    for event in ("fit_start", "iteration_start", "epoch_start", "before_dataloader", "epoch_end", "fit_end"):
        engine.run_event(event)

    names = ("fit", "iteration", "epoch", "dataloader")
    expected = [f"<event/{name}" for name in names] + [f"event/{name}>" for name in reversed(names)]
    assert profiler.calls == expected


def test_an_end_without_a_beginning_is_not_marked(profiler: Profiler) -> None:
    engine = make_engine(profiler)
    engine.run_event("epoch_end")  # of a run that is resumed within an epoch

    assert profiler.calls == []


def test_an_error_ends_what_it_interrupts_and_the_run_may_go_on(profiler: Profiler) -> None:
    class Failing(Callback):
        def before_loss(self, state: State, logger: Logger) -> None:
            raise ZeroDivisionError

    engine = make_engine(profiler, Failing())
    for _ in range(2):
        for event in ("fit_start", "epoch_start", "batch_start"):
            engine.run_event(event)
        with pytest.raises(ZeroDivisionError):
            engine.run_event("before_loss")
    for event in ("batch_end", "epoch_end", "fit_end"):
        engine.run_event(event)

    assert_nested(profiler.calls)
    assert profiler.calls.count("<event/fit") == 2
    assert profiler.calls.count("callback/Failing/event/before_loss>") == 2


def test_callbacks_of_one_class_share_a_marker_and_may_run_within_each_other(profiler: Profiler) -> None:
    class Nested(Callback):
        engine: Engine
        depth = 0

        def batch_end(self, state: State, logger: Logger) -> None:
            if Nested.depth < 2:
                Nested.depth += 1
                self.engine.run_event("batch_end")

    engine = make_engine(profiler, Nested(), Nested())
    for callback in engine.state.callbacks:
        callback.engine = engine  # type: ignore[attr-defined]
    engine.run_event("batch_end")

    assert_nested(profiler.calls)


def test_a_profiler_may_come_and_go(profiler: Profiler) -> None:
    engine = make_engine(None, Watch(seen := []))
    engine.run_event("batch_start")
    engine.state.profiler = profiler
    engine.run_event("batch_start")
    engine.run_event("batch_end")
    engine.state.profiler = None
    engine.run_event("batch_start")

    assert profiler.calls.count("<event/batch") == profiler.calls.count("event/batch>") == 1
    assert seen == ["watch"] * 4


def test_without_a_profiler_nothing_stands_between_the_engine_and_what_runs() -> None:
    engine = make_engine(None, algorithms=Act([]))

    assert engine.dispatch.before_forward is None
    assert engine._algorithm_plan(Event.BATCH_START, {})._applied is engine._ordering.algorithms
    assert engine._markers is None
