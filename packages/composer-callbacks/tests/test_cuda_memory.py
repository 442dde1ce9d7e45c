"""`MemorySnapshot` and `OOMObserver`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.callbacks.memory_snapshot import MemorySnapshot
from composer.callbacks.oom_observer import OOMObserver, SnapshotFileNameConfig
from composer.core import Engine, State
from composer.loggers import Logger, LoggerDestination

FRAME = {"name": "forward", "filename": "model.py", "line": 3}
BLOCK = {"size": 512, "requested_size": 500, "address": 4096, "state": "active_allocated", "frames": [FRAME]}
SEGMENT = {"device": 0, "address": 4096, "total_size": 1024, "allocated_size": 512, "active_size": 512, "stream": 0}
EVENT = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": [FRAME]}
SNAPSHOT = {
    "segments": [{**SEGMENT, "segment_type": "small", "blocks": [BLOCK], "frames": []}],
    "device_traces": [[EVENT]],
}


class Store(LoggerDestination):
    """Logger that stores the contents of files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files[remote_file_name] = file_path.read_bytes()


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replace the parts of torch that need a CUDA device; `calls` are those to start and stop recording."""
    cuda = SimpleNamespace(calls=[], observers=[])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **kwargs: cuda.calls.append((enabled, kwargs))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", cuda.observers.append, raising=False)
    monkeypatch.setenv("PATH", "")
    return cuda


@pytest.fixture
def gpu_run() -> Any:
    """Begins a run that says its device is a GPU, with tensors on the CPU."""
    engines: list[Engine] = []

    def begin(callback: Any, store: Store) -> Engine:
        state = State(
            torch.nn.Linear(1, 1), max_duration="99ba", run_name="fast", dataloader=[0], callbacks=[callback, store]
        )
        state.device = SimpleNamespace(name="gpu")  # type: ignore[assignment]
        engines.append(Engine(state, Logger(state, store)))
        engines[-1].run_event("init")
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def train(engine: Engine, batches: int) -> None:
    for _ in range(batches):
        engine.run_event("batch_start")
        engine.state.timestamp = engine.state.timestamp.to_next_batch()
        engine.run_event("batch_end")


def test_some_batches_are_recorded_and_shown(cuda: Any, gpu_run: Any) -> None:
    store = Store()
    engine = gpu_run(MemorySnapshot(skip_batches=2, interval="3ba", max_entries=7), store)
    train(engine, 2)
    assert cuda.calls == []
    train(engine, 1)
    assert cuda.calls == [("all", {"max_entries": 7})]
    train(engine, 9)
    assert cuda.calls == [("all", {"max_entries": 7}), (None, {})]

    path = Path("fast/torch_traces/rank0.5.memory_snapshot.pickle")
    assert sorted(path.parent.iterdir()) == [path.with_suffix(".html"), path]
    assert pickle.loads(path.read_bytes()) == SNAPSHOT
    assert "<html>" in path.with_suffix(".html").read_text()
    folder = "fast/torch_memory_traces/rank0.5.memory_snapshot"
    assert store.files == {
        f"{folder}.pickle": path.read_bytes(),
        f"{folder}.html": path.with_suffix(".html").read_bytes(),
    }


def test_the_observer_records_on_when_the_snapshot_is_taken(cuda: Any, gpu_run: Any) -> None:
    gpu_run(OOMObserver(max_entries=9), Store())
    engine = gpu_run(MemorySnapshot(skip_batches=0, interval=1, max_entries=7), Store())
    train(engine, 1)
    assert list(Path("fast/torch_traces").glob("*.pickle"))
    assert cuda.calls == [("all", {"max_entries": 9})] * 2


def test_a_snapshot_that_cannot_be_written_stops_recording(cuda: Any, gpu_run: Any) -> None:
    engine = gpu_run(MemorySnapshot(skip_batches=0, interval=2, overwrite=True), Store())
    train(engine, 1)
    Path("fast/torch_traces/rank0.2.memory_snapshot.pickle").mkdir()
    with pytest.raises(IsADirectoryError):
        train(engine, 1)
    engine.close()
    assert cuda.calls[1:] == [(None, {})]


def test_a_run_that_ends_early_stops_recording(cuda: Any, gpu_run: Any) -> None:
    engine = gpu_run(MemorySnapshot(skip_batches=0), Store())
    train(engine, 1)
    engine.close()
    assert cuda.calls[-1] == (None, {})
    assert not list(Path("fast/torch_traces").iterdir())


def test_files_of_another_run_stay_unless_they_may_go(gpu_run: Any) -> None:
    def run(overwrite: bool) -> None:
        engine = gpu_run(
            MemorySnapshot(skip_batches=0, interval=1, remote_file_name=None, overwrite=overwrite), Store()
        )
        train(engine, 1)

    run(False)
    run(True)
    with pytest.raises(FileExistsError, match=r"would replace fast/torch_traces/rank0.1.memory_snapshot.pickle"):
        run(False)


@pytest.mark.parametrize("make", [MemorySnapshot, OOMObserver])
def test_without_cuda_they_warn_and_do_nothing(cuda: Any, run: Any, make: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match=rf"`{make.__name__}` only works on CUDA devices, but the model is on 'cpu'"):
        run(make()).fit()
    assert cuda.calls == cuda.observers == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip_batches": -1}, "`skip_batches` must be at least 0 batches"),
        ({"interval": "1ep"}, "`interval` must be a number of batches"),
        ({"interval": 0}, "`interval` must be a number of batches"),
        ({"max_entries": 0}, "`max_entries` must be at least 1 event"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySnapshot(**arguments)


def test_the_observer_refuses_impossible_arguments_too() -> None:
    with pytest.raises(ValueError, match="`max_entries` must be at least 1 event"):
        OOMObserver(max_entries=0)


def test_the_names_of_the_files() -> None:
    assert SnapshotFileNameConfig.from_file_name("a/b").list_filenames() == [
        "a/b_snapshot.pickle",
        "a/b_trace_plot.html",
        "a/b_segment_plot.html",
        "a/b_segment_flamegraph.svg",
        "a/b_memory_flamegraph.svg",
    ]


def test_a_failed_allocation_writes_the_files(cuda: Any, gpu_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    gpu_run(OOMObserver(max_entries=5), store)
    assert cuda.calls == [("all", {"max_entries": 5})]
    cuda.observers[0](0, 10, 100, 1)
    cuda.observers[0](0, 10, 100, 1)  # a second one replaces the first
    written = {"rank0_oom_snapshot.pickle", "rank0_oom_trace_plot.html", "rank0_oom_segment_plot.html"}
    folder = Path("fast/torch_traces")

    assert {path.name for path in folder.iterdir()} == written
    assert store.files == {f"fast/oom_traces/{name}": (folder / name).read_bytes() for name in written}
    assert "GPU 0 cannot allocate 10 bytes (1 of 100 bytes are free)" in caplog.text


def test_pictures_are_drawn_where_the_script_is(
    cuda: Any, gpu_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "flamegraph.pl"
    script.write_text("#!/bin/sh\necho '<svg/>'\n/bin/cat\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu_run(OOMObserver(remote_file_name=None), Store())
    cuda.observers[0](0, 10, 100, 1)
    for name in ("segment", "memory"):
        drawn = Path(f"fast/torch_traces/rank0_oom_{name}_flamegraph.svg").read_text()
        assert drawn.startswith("<svg/>")
        assert "model.py:3:forward" in drawn


def test_what_cannot_be_written_is_logged(
    cuda: Any, gpu_run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_run(OOMObserver(), Store())
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    cuda.observers[0](0, 10, 100, 1)
    assert "The use of the memory could not be written." in caplog.text


def test_after_the_run_nothing_is_written_and_a_new_run_attaches_nothing_more(cuda: Any, gpu_run: Any) -> None:
    observer = OOMObserver()
    gpu_run(observer, Store()).close()
    cuda.observers[0](0, 10, 100, 1)
    assert not Path("fast").exists()
    gpu_run(observer, Store()).close()
    assert len(cuda.observers) == 1
    assert cuda.calls[-1] == (None, {})


def test_the_observer_leaves_files_of_another_run(gpu_run: Any) -> None:
    path = Path("fast/torch_traces/rank0_oom_segment_plot.html")
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(FileExistsError, match=r"would replace fast/torch_traces/rank0_oom_segment_plot.html"):
        gpu_run(OOMObserver(), Store())
    gpu_run(OOMObserver(overwrite=True), Store())
