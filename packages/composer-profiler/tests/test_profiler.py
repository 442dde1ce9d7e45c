from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from composer import Trainer
from composer.core import Callback, Engine, State
from composer.profiler import (
    JSONTraceHandler,
    Profiler,
    ProfilerAction,
    SystemProfiler,
    TorchProfiler,
    cyclic_schedule,
)
from composer.testing import EventCounterCallback


def skip(state: State) -> ProfilerAction:
    return ProfilerAction.SKIP


def test_the_parts_follow_the_arguments() -> None:
    nothing = {f"torch_prof_{name}": False for name in ("record_shapes", "profile_memory", "with_stack", "with_flops")}
    kinds = [type(part) for part in Profiler(skip, [])._callbacks]
    without_torch = [type(part) for part in Profiler(skip, [], **nothing)._callbacks]
    without_system = [type(part) for part in Profiler(skip, [], sys_prof_cpu=False)._callbacks]

    assert kinds == [SystemProfiler, TorchProfiler]
    assert without_torch == [SystemProfiler]
    assert without_system == [TorchProfiler]


def test_binding_adds_everything_to_the_callbacks() -> None:
    state, handler = State(model=torch.nn.Linear(1, 1)), MagicMock()
    profiler = Profiler(trace_handlers=[handler], schedule=cyclic_schedule())
    profiler.bind_to_state(state)

    assert state.callbacks == [profiler, *profiler._callbacks, handler]
    assert state.profiler is profiler


def test_a_mock_as_a_handler_lives_through_events() -> None:
    handler = MagicMock()
    profiler = Profiler(trace_handlers=[handler], schedule=cyclic_schedule(warmup=0))
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[1, 2])
    profiler.bind_to_state(state)
    engine = Engine(state)
    for event in ("init", "fit_start", "fit_end", "fit_start", "fit_end"):
        engine.run_event(event)
    engine.close()

    names = [call.kwargs["name"] for call in handler.process_duration_event.call_args_list]
    assert names.count("event/fit") == 4


@pytest.mark.parametrize("missing", ["record_shapes", "profile_memory", "with_stack"])
def test_the_memory_timeline_needs_what_it_is_made_of(missing: str) -> None:
    arguments = {f"torch_prof_{name}": True for name in ("record_shapes", "profile_memory", "with_stack")}
    with pytest.raises(ValueError, match="`torch_prof_memory_filename` needs"):
        Profiler(skip, [], torch_prof_memory_filename="m.html", **{**arguments, f"torch_prof_{missing}": False})


def test_a_schedule_is_a_function() -> None:
    with pytest.raises(TypeError, match="`schedule` must be a function"):
        Profiler("sometimes", [])  # type: ignore[arg-type]


def test_the_remote_files_that_are_uris_are_listed() -> None:
    handler = JSONTraceHandler(merged_trace_remote_file_name="s3://bucket/{run_name}/merged.json")
    profiler = Profiler(skip, [handler, MagicMock()], torch_prof_remote_file_name="gs://b/t.json")

    assert profiler.remote_filenames == ["gs://b/t.json", "s3://bucket/{run_name}/merged.json"]
    assert Profiler(skip, []).remote_filenames == []


@pytest.mark.parametrize("part", [JSONTraceHandler, SystemProfiler, TorchProfiler])
def test_parts_do_not_work_without_a_profiler(part: type[Callback]) -> None:
    state = State(model=torch.nn.Linear(1, 1), callbacks=part())
    engine = Engine(state)
    with pytest.raises(RuntimeError, match=f"`{part.__name__}` works with a profiler"):
        engine.run_event("init")
    engine.close()


def test_every_part_survives_fits_closing_twice_and_a_new_run(make_trainer: Callable[..., Trainer]) -> None:
    profiler = Profiler(skip, JSONTraceHandler(), torch_prof_memory_filename=None)
    trainer = make_trainer(profiler, device_train_microbatch_size=1)
    trainer.fit()
    trainer.state.max_duration = 2 * trainer.state.max_duration
    trainer.fit()
    trainer.close()
    for callback in trainer.state.callbacks:
        callback.close(trainer.state, trainer.logger)
    again = make_trainer(profiler, run_name="again")
    again.fit()

    assert (trainer.state.timestamp.batch, again.state.timestamp.batch) == ("16ba", "8ba")


def test_a_profiler_never_closed_without_training(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    make_trainer(Profiler(cyclic_schedule(warmup=0), JSONTraceHandler())).close()

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_profiling_changes_nothing_of_the_training(make_trainer: Callable[..., Trainer]) -> None:
    counters = [EventCounterCallback(), EventCounterCallback()]
    handler = JSONTraceHandler()
    profilers = [None, Profiler(cyclic_schedule(warmup=1, active=1, repeat=0), handler)]
    weights = []
    for counter, profiler in zip(counters, profilers, strict=True):
        torch.manual_seed(3)
        trainer = make_trainer(profiler, callbacks=counter, seed=5)
        trainer.fit()
        weights.append([parameter.detach().clone() for parameter in trainer.state.model.parameters()])

    assert counters[0].event_to_num_calls == counters[1].event_to_num_calls
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert len(handler.saved_traces) == 5


def test_system_counters(make_trainer: Callable[..., Trainer], tmp_path: Path, read: Callable[[Path], Any]) -> None:
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=100, repeat=0),
        JSONTraceHandler(),
        sys_prof_memory=True,
        sys_prof_disk=True,
        sys_prof_net=True,
        sys_prof_stats_thread_interval_seconds=0.001,
        torch_prof_profile_memory=False,
        torch_prof_with_flops=False,
    )
    enough = _Enough()
    profiler.trace_handlers.append(enough)
    make_trainer(profiler, max_duration="100ep", callbacks=_Until(enough)).fit()

    merged = read(tmp_path / "run/traces/merged_trace.json")
    counters = {event["name"]: event["args"] for event in merged if event["ph"] == "C"}
    assert 0 <= counters["cpu"]["cpu_percent"] <= 100
    assert 0.1 < sum(counters["memory/virtual"].values()) < 1e5
    assert set(counters["memory/swap"]) == {"used_gib", "free_gib"}


class _Enough(JSONTraceHandler):
    """Notices that there were counters."""

    seen = 0

    def __init__(self) -> None:
        super().__init__(folder="other", merged_trace_filename=None)

    def process_counter_event(self, *args: Any, **kwargs: Any) -> None:
        self.seen += 1


class _Until(Callback):
    """Ends training when there is enough."""

    def __init__(self, enough: _Enough) -> None:
        self.enough = enough

    def batch_end(self, state: State, logger: Any) -> None:
        if self.enough.seen > 20:
            state.stop_training()


def test_units_of_the_gpu_memory() -> None:
    from composer.profiler.system_profiler import _cuda_memory

    found = _cuda_memory({"allocated_bytes.all.current": 3 * 2**30, "reserved_bytes.all.peak": 2**29})

    assert found["memory/cuda/current_allocated_mem"] == {"current_allocated_mem": 3}
    assert found["memory/cuda/peak_reserved_mem"] == {"peak_reserved_mem": 0.5}
    assert len(found) == 8


def test_disk_and_network_are_counted_from_the_start() -> None:
    profiler = SystemProfiler(profile_cpu=False, profile_disk=True, profile_net=True)
    start = dict.fromkeys(profiler._totals(), 0.0)
    earlier = {name: value - 5 for name, value in profiler._totals().items()}
    found = profiler._look(earlier, State(torch.nn.Linear(1, 1)))

    assert set(found) == set(start)
    assert all(min(values.values()) >= 5 for values in found.values())
    fields = {tuple(values) for name, values in found.items() if name.startswith("network/")}
    assert fields <= {("kb_sent",), ("kb_recv",)}


def test_an_interval_is_positive() -> None:
    with pytest.raises(ValueError, match="`stats_thread_interval_seconds` must be positive"):
        SystemProfiler(stats_thread_interval_seconds=0)


def test_a_failing_measurement_is_logged_and_training_continues(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no such counter")

    monkeypatch.setattr("composer.profiler.system_profiler.psutil.cpu_percent", fail)
    with caplog.at_level(logging.ERROR):
        trainer = make_trainer(Profiler(cyclic_schedule(warmup=0), []))
        trainer.fit()
        trainer.close()

    assert "has stopped after an error" in caplog.text
    assert "no such counter" in caplog.text


def test_an_error_leaves_no_marker_open(make_trainer: Callable[..., Trainer]) -> None:
    class Failing(Callback):
        def before_forward(self, state: State, logger: Any) -> None:
            if state.timestamp.batch == "2ba":
                raise ZeroDivisionError

    profiler = Profiler(cyclic_schedule(warmup=0, active=9), JSONTraceHandler())
    trainer = make_trainer(profiler, callbacks=Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()

    assert [marker.name for marker in profiler._markers.values() if marker._started_ns is not None] == []
    make_trainer(profiler, run_name="again").fit()
