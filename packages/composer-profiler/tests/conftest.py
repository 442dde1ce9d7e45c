"""Small runs, and a slow checker of Chrome's Trace Event Format."""

from __future__ import annotations

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.loggers import LoggerDestination
from composer.testing import RandomClassificationDataset, SimpleModel

_PHASES = {"B", "E", "X", "i", "C", "M", "s", "t", "f"}


def _check_trace(trace: Any) -> None:
    """Check a trace against the rules of the format, one after the other."""
    json.dumps(trace, allow_nan=False)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert isinstance(events, list)
    for event in events:
        assert event["ph"] in _PHASES, event
        assert isinstance(event["name"], str), event
        assert type(event["pid"]) is int, event
        assert type(event["tid"]) is int, event
        if event["ph"] != "M":
            assert type(event["ts"]) in (int, float), event
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        if event["ph"] == "C":
            assert event["args"], event
            assert all(type(value) in (int, float) for value in event["args"].values()), event
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [event for event in events if event["ph"] == "M"]
    named = Counter(event["pid"] for event in events if event["name"] == "process_name")
    assert {event["pid"] for event in timed} <= set(named)
    assert set(named.values()) <= {1}
    threads: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for event in sorted(timed, key=lambda event: event["ts"]):
        threads[(event["pid"], event["tid"])].append(event)
    for of_thread in threads.values():
        _check_nesting(of_thread)
    flows = [event for event in timed if event["ph"] in "sf"]
    for flow in {event["id"] for event in flows}:
        assert {event["ph"] for event in flows if event["id"] == flow} == {"s", "f"}, flow
        assert [event["ph"] for event in flows if event["id"] == flow].count("s") == 1, flow


def _check_nesting(events: list[Any]) -> None:
    """Spans of one thread are disjoint, or one is within the other."""
    opened: list[Any] = []
    for event in events:
        if event["ph"] == "B":
            opened.append(event)
        elif event["ph"] == "E":
            assert opened, event
            assert opened.pop()["name"] == event["name"], event
    assert opened == []
    ends: list[float] = []
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + 0.002:  # torch's times are rounded to nanoseconds
            ends.pop()
        end = event["ts"] + event["dur"]
        assert event["dur"] >= 0, event
        assert not ends or end <= ends[-1] + 0.002, event
        ends.append(end)


@pytest.fixture(scope="session")
def check_trace() -> Callable[[Any], None]:
    return _check_trace


class Store(LoggerDestination):
    """Keeps the files it is given."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        assert overwrite or remote_file_name not in self.files
        self.files[remote_file_name] = file_path.read_bytes()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer of a small model with a profiler, in an empty folder. It is closed at the end of the test."""
    monkeypatch.chdir(tmp_path)
    made: list[Trainer] = []

    def make(profiler: Any, *, samples: int = 8, **kwargs: Any) -> Trainer:
        model = SimpleModel()
        arguments: dict[str, Any] = {
            "model": model,
            "train_dataloader": DataLoader(RandomClassificationDataset(size=samples), batch_size=2),
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
            "max_duration": "2ep",
            "device": "cpu",
            "progress_bar": False,
            "run_name": "run",
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The profiler is enabled")
            made.append(Trainer(profiler=profiler, **(arguments | kwargs)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def read() -> Callable[[Path], Any]:
    return lambda path: json.loads(Path(path).read_text())
