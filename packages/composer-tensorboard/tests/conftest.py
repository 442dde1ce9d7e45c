"""A run, and what TensorBoard reads from the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composer.testing import LoggedRun


@pytest.fixture
def start() -> Any:
    """Begins a run, which is closed at the end of the test."""
    runs: list[LoggedRun] = []

    def begin(*args: Any, **kwargs: Any) -> LoggedRun:
        runs.append(LoggedRun(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(folder: str | Path = "tensorboard_logs/my-run") -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture
def curve() -> Callable[..., list[tuple[int, float]]]:
    """The values of a scalar, with their steps."""

    def points(key: str, folder: str | Path = "tensorboard_logs/my-run") -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read(folder).Scalars(key)]

    return points


@pytest.fixture
def events() -> Callable[..., EventAccumulator]:
    return read
