"""The engine: dispatch, order of callbacks and loggers, passes, traces, closing, and the plan it explains."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from composer.core import Algorithm, Callback, Engine, Event, State, Trace
from composer.core.passes import order_by_placement, set_filo_order, warn_on_discouraged
from composer.loggers import Logger, LoggerDestination


class Recorder:
    """Says who ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []


class Named(Algorithm):
    events = frozenset({Event.INIT, Event.BATCH_START, Event.AFTER_LOSS})

    def __init__(self, name: str, recorder: Recorder, exit_code: int | None = None) -> None:
        self.name, self.recorder, self.exit_code = name, recorder, exit_code

    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        self.recorder.ran.append(self.name)
        return self.exit_code

    def __repr__(self) -> str:
        return self.name


class Watching(Callback):
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def init(self, state: State, logger: Logger) -> None:
        self.recorder.ran.append(self.name)

    def batch_start(self, state: State, logger: Logger) -> None:
        self.recorder.ran.append(self.name)


class Log(LoggerDestination):
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder
        self.traces: list[dict[str, Any]] = []

    def init(self, state: State, logger: Logger) -> None:
        self.recorder.ran.append(self.name)

    def batch_start(self, state: State, logger: Logger) -> None:
        self.recorder.ran.append(self.name)

    def log_traces(self, traces: dict[str, Any]) -> None:
        self.traces.append(traces)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def make_state(**kwargs: Any) -> State:
    return State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], **kwargs)


def test_at_init_loggers_come_first_and_algorithms_last(recorder: Recorder) -> None:
    state = make_state(
        algorithms=[Named("a1", recorder), Named("a2", recorder)],
        callbacks=[Watching("c1", recorder), Log("l1", recorder), Watching("c2", recorder), Log("l2", recorder)],
    )
    Engine(state).run_event(Event.INIT)

    assert recorder.ran == ["l1", "l2", "c1", "c2", "a1", "a2"]


def test_at_other_events_algorithms_come_first_and_loggers_last(recorder: Recorder) -> None:
    state = make_state(
        algorithms=[Named("a1", recorder), Named("a2", recorder)],
        callbacks=[Watching("c1", recorder), Log("l1", recorder), Watching("c2", recorder), Log("l2", recorder)],
    )
    Engine(state).run_event("batch_start")

    assert recorder.ran == ["a1", "a2", "c1", "c2", "l1", "l2"]


def test_traces_tell_what_ran(recorder: Recorder) -> None:
    log = Log("log", recorder)
    state = make_state(algorithms=[Named("a", recorder, 3), Named("b", recorder)], callbacks=log)
    traces = Engine(state, Logger(state, log)).run_event(Event.AFTER_LOSS)

    assert {
        "b/Event.AFTER_LOSS": Trace("Named", Event.AFTER_LOSS, None, 0, True),
        "a/Event.AFTER_LOSS": Trace("Named", Event.AFTER_LOSS, 3, 1, True),
    } == traces
    assert log.traces == [{"algorithm_traces/Named/Event.AFTER_LOSS": 1}]


def test_match_is_called_only_at_the_declared_events() -> None:
    asked: list[Event] = []

    class Asked(Algorithm):
        events = frozenset({Event.BATCH_START})

        def match(self, event: Event, state: State) -> bool:
            asked.append(event)
            return False

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            raise AssertionError("never matches")

    engine = Engine(make_state(algorithms=Asked()))
    for event in Event:
        engine.run_event(event)

    assert asked == [Event.BATCH_START]


def test_match_is_called_once_at_every_event_without_declared_events() -> None:
    asked: list[Event] = []

    class Asked(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            asked.append(event)
            return True

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    engine = Engine(make_state(algorithms=Asked()))
    for event in Event:
        engine.run_event(event)

    assert list(Event) == asked


def test_an_algorithm_must_say_when_it_acts() -> None:
    class Silent(Algorithm):
        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    with pytest.raises(TypeError, match=r"`Silent` must declare when it acts, but defines neither"):
        Engine(make_state(algorithms=Silent()))


def test_a_callback_is_called_only_for_the_hooks_it_overrides(recorder: Recorder) -> None:
    callback = Watching("c", recorder)
    engine = Engine(make_state(callbacks=callback))

    assert [Event(row.event) for row in engine.explain() if row.name == "Watching"] == [Event.INIT, Event.BATCH_START]


def test_a_callback_that_overrides_run_event_sees_every_event() -> None:
    seen: list[Event] = []

    class Everything(Callback):
        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            seen.append(event)

    engine = Engine(make_state(callbacks=Everything()))
    for event in Event:
        engine.run_event(event)

    assert list(Event) == seen


def test_a_hook_with_a_misspelt_name_is_warned_of_at_class_creation() -> None:
    with pytest.warns(UserWarning, match=r"_Wrong.on_batch_end` is not the name of an event.*`batch_end`"):

        class _Wrong(Callback):
            def on_batch_end(self, state: State, logger: Logger) -> None:
                pass

    class _Helper(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            self.on_batch_end(state, logger)

        def on_batch_end(self, state: State, logger: Logger) -> None:
            pass

        def generate(self, state: State, logger: Logger) -> None:
            pass


def test_the_public_methods_of_a_callback_are_the_events() -> None:
    methods = {name for name in dir(Callback) if not name.startswith("_")}

    assert {event.value for event in Event} == methods - {
        "state_dict",
        "load_state_dict",
        "run_event",
        "close",
        "post_close",
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda state, new: state.algorithms.append(new),
        lambda state, new: state.algorithms.extend([new]),
        lambda state, new: state.algorithms.insert(0, new),
        lambda state, new: setattr(state, "algorithms", [new]),
        lambda state, new: state.algorithms.__iadd__([new]),
    ],
)
def test_the_plan_follows_changes_of_the_algorithms(recorder: Recorder, change: Any) -> None:
    state = make_state()
    engine = Engine(state)
    engine.run_event(Event.BATCH_START)
    change(state, Named("new", recorder))
    engine.run_event(Event.BATCH_START)
    state.algorithms.clear()
    engine.run_event(Event.BATCH_START)

    assert recorder.ran == ["new"]


def test_the_plan_follows_changes_of_the_callbacks(recorder: Recorder) -> None:
    state = make_state()
    engine = Engine(state)
    state.callbacks.append(Watching("new", recorder))
    engine.run_event(Event.BATCH_START)
    del state.callbacks[0]
    engine.run_event(Event.BATCH_START)

    assert recorder.ran == ["new"]


def test_algorithms_may_be_given_to_the_engine(recorder: Recorder) -> None:
    state = make_state()
    Engine(state=state, algorithms=[Named("a", recorder)]).run_event("batch_start")

    assert recorder.ran == ["a"]
    assert len(state.algorithms) == 1


# ---- passes ----


def backwards(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    return algorithms[::-1]


def first_only(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    return algorithms[:1]


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (backwards, [order_by_placement, set_filo_order, warn_on_discouraged, backwards]),
        ((backwards, 0), [backwards, order_by_placement, set_filo_order, warn_on_discouraged]),
        ([backwards, 0], [backwards, order_by_placement, set_filo_order, warn_on_discouraged]),
        ([backwards, first_only], [order_by_placement, set_filo_order, warn_on_discouraged, backwards, first_only]),
        (
            [(backwards, 1), (first_only, -1)],
            [order_by_placement, backwards, set_filo_order, warn_on_discouraged, first_only],
        ),
        (None, [order_by_placement, set_filo_order, warn_on_discouraged]),
    ],
)
def test_passes_are_inserted_at_their_index(passes: Any, expected: list[Any]) -> None:
    assert expected == Engine(make_state(), algorithm_passes=passes).algorithm_passes


@pytest.mark.parametrize("passes", [3, "pass", [3], (backwards, "first"), [(backwards, 0, 1)]])
def test_other_forms_of_passes_are_refused(passes: Any) -> None:
    with pytest.raises(ValueError, match=r"`algorithm_passes` must be a function"):
        Engine(make_state(), algorithm_passes=passes)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [(backwards, ["b", "a"]), ((backwards, 0), ["b", "a"]), ([first_only, backwards], ["a"])],
)
def test_passes_run_on_the_matching_algorithms(recorder: Recorder, passes: Any, expected: list[str]) -> None:
    state = make_state(algorithms=[Named("a", recorder), Named("b", recorder)])
    Engine(state, algorithm_passes=passes).run_event(Event.BATCH_START)

    assert expected == recorder.ran


def test_a_pass_returns_algorithms_that_act_there(recorder: Recorder) -> None:
    named = Named("a", recorder)
    for listed in ([named], []):
        engine = Engine(
            make_state(algorithms=[named]),
            algorithm_passes=lambda algorithms, event, listed=listed: [*listed, Named("b", recorder)],
        )
        with pytest.raises(ValueError, match=r"A pass must return algorithms that act at Event\.BATCH_START"):
            engine.run_event(Event.BATCH_START)


def test_a_pass_can_be_registered_later(recorder: Recorder) -> None:
    state = make_state(algorithms=[Named("a", recorder), Named("b", recorder)])
    engine = Engine(state)
    engine.register_pass(backwards)
    engine.run_event(Event.BATCH_START)

    assert recorder.ran == ["b", "a"]
    assert "reordered by custom passes" in str(engine.explain())


# ---- what an event needs ----


def test_events_need_a_loader_and_a_duration(recorder: Recorder) -> None:
    state = State(model=torch.nn.Linear(1, 1), algorithms=Named("a", recorder))
    engine = Engine(state)
    engine.run_event(Event.INIT)
    with pytest.raises(AssertionError, match=r"'batch_start' cannot run: `state.dataloader` is not set"):
        engine.run_event(Event.BATCH_START)
    state.set_dataloader([0], "train")
    with pytest.raises(AssertionError, match=r"`state.max_duration` is not set"):
        engine.run_event(Event.BATCH_START)
    with pytest.raises(AssertionError, match=r"`state.max_duration` is not set"):
        engine.run_event(Event.EPOCH_END)  # also where nobody listens
    engine.run_event(Event.EVAL_START)
    state.max_duration = "1ep"
    engine.run_event(Event.BATCH_START)
    state.set_dataloader()
    with pytest.raises(AssertionError, match=r"`state.dataloader` is not set"):
        engine.run_event(Event.BATCH_START)

    assert recorder.ran == ["a", "a"]


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`Event` must be one of"):
        Engine(make_state()).run_event("batch_ends")


# ---- closing ----


class Closing(Callback):
    def __init__(self, broken: bool = False) -> None:
        self.closed: list[str] = []
        self.broken = broken

    def close(self, state: State, logger: Logger) -> None:
        self.closed.append("close")
        if self.broken:
            raise RuntimeError("broken")

    def post_close(self) -> None:
        self.closed.append("post_close")


def test_close_closes_every_callback_once() -> None:
    callback = Closing()
    engine = Engine(make_state(callbacks=callback))
    engine.close()
    engine.close()

    assert callback.closed == ["close", "post_close"]
    with pytest.raises(RuntimeError, match=r"The engine is closed"):
        engine.run_event(Event.INIT)


def test_a_callback_that_fails_to_close_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken, fine = Closing(broken=True), Closing()
    with caplog.at_level(logging.DEBUG, "composer.core.engine"):
        Engine(make_state(callbacks=[broken, fine])).close()

    assert broken.closed == ["close"]
    assert fine.closed == ["close", "post_close"]
    assert [record.message for record in caplog.records] == [
        "Closing the engine.",
        "Closing callback Closing",
        "Error running Closing.close(). Skipping Closing.post_close().",
        "Closing callback Closing",
        "Post-closing callback Closing",
        "Engine closed.",
    ]


def test_a_callback_cannot_be_open_in_two_runs() -> None:
    callback = Closing()
    first = Engine(make_state(callbacks=callback))
    first.run_event(Event.INIT)
    second = Engine(make_state(callbacks=callback))
    with pytest.raises(
        RuntimeError, match=r"Cannot create a new trainer with an open callback or logger from a previous trainer"
    ):
        second.run_event(Event.INIT)
    first.close()

    second.run_event(Event.INIT)
    second.close()


def test_nothing_else_keeps_an_engine_alive_and_dropping_it_closes() -> None:
    callback = Closing()
    engine = Engine(make_state(callbacks=callback))

    assert sys.getrefcount(engine) == 2

    del engine
    gc.collect()
    assert callback.closed == ["close", "post_close"]


def test_an_engine_closes_at_the_end_of_the_program() -> None:
    program = """
        import torch
        from composer.core import Callback, Engine, State

        class Closing(Callback):
            def close(self, state, logger):
                print("CLOSED")

        engine = Engine(State(model=torch.nn.Linear(1, 1), callbacks=Closing()))
        print("END")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout.split() == ["END", "CLOSED"]


def test_workers_of_a_persistent_loader_end_with_the_engine() -> None:
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1, persistent_workers=True)
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=loader)
    engine = Engine(state)
    assert len(list(loader)) == 4
    workers = loader._iterator._workers
    engine.close()

    assert not any(worker.is_alive() for worker in workers)


def test_debug_records_name_the_event_and_the_callback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorder: Recorder
) -> None:
    monkeypatch.setenv("ENGINE_DEBUG", "1")
    engine = Engine(make_state(callbacks=Watching("c", recorder)))
    with caplog.at_level(logging.DEBUG, "composer.core.engine"):
        engine.run_event(Event.INIT)
        engine.run_event(Event.EVAL_START)
        engine.run_event(Event.PREDICT_START)

    assert [record.message for record in caplog.records] == [
        "[ep=0][ba=0][event=INIT]: Running event",
        "[ep=0][ba=0][event=INIT]: Running callback Watching",
        "[ep=0][ba=0][eval_ba=0][event=EVAL_START]: Running event",
        "[ep=0][ba=0][predict_ba=0][event=PREDICT_START]: Running event",
    ]
    engine.close()


def test_the_module_can_be_imported_outside_the_main_thread() -> None:
    program = """
        import signal, threading
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        failures = []
        def load():
            try:
                import composer.core.engine
            except BaseException as error:
                failures.append(error)
        thread = threading.Thread(target=load)
        thread.start(); thread.join()
        assert not failures, failures
        assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


# ---- explain ----


def test_the_plan_lists_actors_order_and_reasons(recorder: Recorder) -> None:
    state = make_state(
        algorithms=[Named("a", recorder), Named("b", recorder)], callbacks=[Watching("c", recorder), Log("l", recorder)]
    )
    plan = Engine(state).explain()

    assert [(row.kind, row.name, row.reason) for row in plan.at("batch_start")] == [
        ("algorithm", "Named", "as listed"),
        ("algorithm", "Named", "as listed"),
        ("callback", "Watching", "as listed"),
        ("logger", "Log", "as listed"),
    ]
    assert [row.kind for row in plan.at(Event.INIT)] == ["logger", "callback", "algorithm", "algorithm"]
    assert plan.at(Event.AFTER_LOSS)[0].reason == "reverse of the list: first in, last out"
    assert str(plan).splitlines()[0].split() == ["event", "order", "kind", "name", "why", "here"]
    assert plan[0] is plan.rows[0]
    assert len(plan) == len(list(plan))


def test_a_notebook_folds_what_is_only_in_the_order_of_the_list(recorder: Recorder) -> None:
    state = make_state(algorithms=[Named("a", recorder), Named("b", recorder)], callbacks=Watching("c", recorder))
    shown, folded = Engine(state).explain()._repr_html_().split("<details>")

    assert "reverse of the list" in shown
    assert "as listed" not in shown
    assert "Watching" in folded
    assert "reverse of the list" not in folded


def test_an_empty_plan_prints_a_sentence() -> None:
    assert str(Engine(make_state()).explain()) == "No algorithm or callback acts at any event."


# ---- code that knows nothing of our attributes ----


def test_strings_run_the_compiled_plan(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make_state(algorithms=Named("a", recorder)))
    monkeypatch.setattr(engine, "_compile", lambda: pytest.fail("compiled again"))
    for event in ("batch_start", "BATCH_START", Event.BATCH_START):
        engine.run_event(event)

    assert recorder.ran == ["a"] * 3


def test_match_is_called_at_every_event_if_a_subclass_overrides_it() -> None:
    class Wider(Named):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.EPOCH_END or super().match(event, state)

    recorder = Recorder()
    engine = Engine(make_state(algorithms=Wider("a", recorder)))
    for event in Event:
        engine.run_event(event)

    # INIT, BATCH_START and AFTER_LOSS of the base class, and EPOCH_END.
    assert recorder.ran == ["a"] * 4


@pytest.mark.parametrize("own", [[], ["a", "b"], {"x"}, "text", 3])
def test_users_may_call_something_else_events_or_placement(own: Any) -> None:
    ran = []

    class Theirs(Algorithm):
        def __init__(self) -> None:
            self.events = own
            self.placement = own

        def match(self, event: Event, state: State) -> bool:
            return event is Event.BATCH_END

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            ran.append(event)

    engine = Engine(make_state(algorithms=Theirs()))
    for event in Event:
        engine.run_event(event)

    assert ran == [Event.BATCH_END]


def test_mocks_of_the_base_classes_are_run() -> None:
    from unittest.mock import MagicMock, Mock

    for kind in (Mock, MagicMock):
        algorithm, callback = kind(spec=Algorithm), MagicMock(spec=Callback)
        algorithm.match.return_value = True
        engine = Engine(make_state(algorithms=algorithm, callbacks=callback))
        engine.run_event(Event.BATCH_END)

        algorithm.apply.assert_called_once()
        callback.run_event.assert_called_once()


def test_algorithms_that_print_alike_have_traces_of_their_own(recorder: Recorder) -> None:
    engine = Engine(make_state(algorithms=[Named("a", recorder), Named("a", recorder)]))

    assert list(engine.run_event(Event.BATCH_START)) == ["a/Event.BATCH_START", "a#2/Event.BATCH_START"]


def test_two_attributes_interpolate_loss_are_warned_of(recorder: Recorder) -> None:
    from composer.algorithms.warnings import NotIntendedUseWarning

    algorithms = [Named("a", recorder), Named("b", recorder)]
    for algorithm in algorithms:
        algorithm.interpolate_loss = True  # type: ignore[attr-defined]
    with pytest.warns(NotIntendedUseWarning, match=r"which also interpolates loss"):
        Engine(make_state(algorithms=algorithms))


class Counting(Algorithm):
    """Has a state, or none."""

    events = frozenset({Event.BATCH_END})

    def __init__(self, has_state: bool) -> None:
        self.has_state = has_state

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"count": 1} if self.has_state else {})


@pytest.mark.parametrize("event", [Event.FIT_START, Event.EVAL_STANDALONE_START])
def test_an_algorithm_with_a_state_belongs_to_the_run_that_was_created_last(event: Event) -> None:
    algorithm = Counting(has_state=True)
    first, second = (Engine(make_state(algorithms=[algorithm])) for _ in range(2))
    first.run_event(Event.INIT)
    first.run_event(event)
    second.run_event(Event.INIT)

    with pytest.raises(ValueError, match=r"uses the same `Counting` object, .* `algorithms=\[Counting\(\.\.\.\)\]`"):
        first.run_event(event)
    second.run_event(event)


@pytest.mark.parametrize("share", [lambda algorithm: algorithm, copy.deepcopy])
def test_algorithms_without_a_state_and_copies_may_be_in_several_runs(share: Any) -> None:
    algorithm = Counting(has_state=share is copy.deepcopy)
    first = Engine(make_state(algorithms=[algorithm]))
    first.run_event(Event.INIT)
    second = Engine(make_state(algorithms=[share(algorithm)]))
    second.run_event(Event.INIT)

    first.run_event(Event.FIT_START)
    second.run_event(Event.FIT_START)
