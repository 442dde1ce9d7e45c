"""When a log file is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import State
from composer.loggers import DeferredValue, LoggerDestination
from composer.loggers.file_logger import FileLogger

LOG = Path("my-run/logs-rank0.txt")


@pytest.fixture(autouse=True)
def own_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Streams of the test's own, so that nothing of pytest's is captured."""


class Uploads(LoggerDestination):
    """Keeps the content of every uploaded file."""

    def __init__(self) -> None:
        self.files: list[tuple[str, str, bool]] = []

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files.append((remote_file_name, file_path.read_text(), overwrite))

    def can_upload_files(self) -> bool:
        return True


def lines() -> list[str]:
    return LOG.read_text().splitlines(keepends=True)


def flushes(run: Any, action: Callable[[], None]) -> int:
    """Count how often an action flushes the file."""
    uploads = run.loggers[1]
    before = len(uploads.files)
    action()
    return len(uploads.files) - before


def test_values_are_read_at_the_flush(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 1e9)
    run = start(FileLogger(flush_interval=3), "100ba", 100)
    run.fit(stop_after=1)
    run.train_batch()
    monkeypatch.setattr(DeferredValue, "cpu_number", lambda value: None)  # as on a GPU
    loss = DeferredValue.of_tensor(torch.tensor(0.25))
    run.logger.log_metrics({"loss": loss})

    assert repr(loss) == "DeferredValue(<not read>)"
    assert not any("batch=2" in line for line in lines())

    run.train_batch()

    assert repr(loss) == "DeferredValue(0.25)"
    assert "[metric][batch=2]: loss: 0.2500 \n" in lines()


def test_between_flushes_the_file_lags_only_a_little(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 0.0)
    run = start(FileLogger(), "100ba", 100)
    run.fit(stop_after=1)
    run.train_batch()

    assert "[metric][batch=1]: loss/train/total: 2.0000 \n" in lines()


def test_between_flushes_nothing_waits_for_a_value(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy is not there at once; lines behind it wait as well, so that they stay in order."""
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 0.0)
    run = start(FileLogger(), "100ba", 100)
    run.fit(stop_after=1)
    monkeypatch.setattr(DeferredValue, "cpu_number", lambda value: None)
    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: False))
    monkeypatch.setattr(DeferredValue, "fetch", lambda values: None)
    run.train_batch()
    run.train_batch()

    assert lines()[-1] == "[metric][batch=1]: trainer/device_train_microbatch_size: 2 \n"

    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: float(value) < 2.5))
    run.train_batch()

    assert lines()[-1] == "[metric][batch=2]: trainer/device_train_microbatch_size: 2 \n"


@pytest.mark.parametrize(
    ("event", "batch", "epoch", "expected"),
    [
        ("batch_end", 1, 0, 0),
        ("batch_end", 3, 0, 1),
        ("batch_end", 6, 0, 1),
        ("epoch_end", 5, 1, 0),
        ("epoch_end", 15, 3, 1),
        ("epoch_start", 0, 0, 1),
        ("eval_start", 1, 0, 1),
        ("fit_end", 1, 0, 1),
        ("fit_start", 0, 0, 0),
    ],
)
def test_the_file_is_flushed_at_intervals_and_turning_points(
    start: Any, event: str, batch: int, epoch: int, expected: int
) -> None:
    run = start([FileLogger(flush_interval=3), Uploads()])
    run.state.timestamp = run.state.timestamp.copy(batch=batch, epoch=epoch)

    assert expected == flushes(run, lambda: run.engine.run_event(event))


def test_a_flush_passes_the_complete_file(start: Any) -> None:
    uploads = Uploads()
    run = start([FileLogger(remote_file_name="logs/{run_name}-{rank}.txt"), uploads])
    run.logger.log_hyperparameters({"a": 1})
    run.engine.run_event("fit_end")
    run.logger.log_hyperparameters({"b": 2})
    run.close()

    name, text = "logs/my-run-0.txt", "[hyperparameter]: a: 1 \n"
    assert [(name, text, True), (name, f"{text}[hyperparameter]: b: 2 \n", True)] == uploads.files


def test_a_value_that_cannot_be_read_does_not_take_the_rest_with_it(start: Any) -> None:
    class Broken(torch.Tensor):
        """Stands for a tensor on a device that has failed."""

        is_cpu = False

        def item(self) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    uploads = Uploads()
    run = start([FileLogger(), uploads])
    broken = torch.tensor(1.0).as_subclass(Broken)
    run.logger.log_metrics({"a": 1, "loss": DeferredValue.of_tensor(broken)})
    print("the reason")

    run.engine.run_event("fit_end")

    expected = [
        "[metric][batch=0]: a: 1 \n",
        "[metric][batch=0]: loss: (could not be read) \n",
        "[stdout]: the reason\n",
    ]
    assert expected == lines()
    assert ["".join(expected)] == [text for _, text, _ in uploads.files]


def test_fsync_is_called_once_a_second_and_at_the_end(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "fsync", asked.append)
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 1e9)
    run = start(FileLogger(flush_interval=1), "5ba", 5)
    run.fit()

    assert len(asked) == 1

    run.close()

    assert len(asked) == 2
