"""A path that begins with "~" is in the user's home wherever one is taken, as `save_folder` is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composer.callbacks.memory_snapshot import MemorySnapshot
from composer.callbacks.oom_observer import OOMObserver
from composer.checkpoint import (
    check_file,
    export_safetensors,
    load_checkpoint,
    load_safetensors,
    read_checkpoint,
    save_checkpoint,
)
from composer.core import State
from composer.loggers.file_logger import FileLogger
from composer.loggers.run_recorder import RunRecorder
from composer.loggers.tensorboard_logger import TensorboardLogger
from composer.profiler import JSONTraceHandler
from composer.testing import SimpleModel, deep_compare


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, for as long as the test runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def log_file(path: str) -> str:
    logger = FileLogger(path, capture_stdout=False, capture_stderr=False)
    return logger.filename_format


@pytest.mark.parametrize(
    "path_of",
    [
        log_file,
        lambda path: RunRecorder(path).folder,
        lambda path: TensorboardLogger(path).log_dir,
        lambda path: MemorySnapshot(folder=path).folder,
        lambda path: OOMObserver(folder=path).folder,
        lambda path: JSONTraceHandler(path).folder,
    ],
    ids=["FileLogger", "RunRecorder", "TensorboardLogger", "MemorySnapshot", "OOMObserver", "JSONTraceHandler"],
)
def test_loggers_and_callbacks_write_into_the_home(home: Path, path_of: Callable[[str], str]) -> None:
    assert path_of("~/{run_name}") == f"{home}/{{run_name}}"


def test_checkpoints_are_written_to_and_read_from_the_home(home: Path) -> None:
    model = SimpleModel()
    state = State(model=model, max_duration="1ep", rank_zero_seed=0, run_name="run")
    save_checkpoint(state, "~/a.pt")
    export_safetensors(model, "~/b.safetensors")
    other = SimpleModel()
    load_safetensors(other, "~/b.safetensors")
    load_checkpoint("~/a.pt", state)

    assert {"a.pt", "b.safetensors"} == {path.name for path in home.iterdir()}
    assert check_file("~/a.pt") == "a.pt"
    assert torch.equal(read_checkpoint("~/a.pt")["state"]["model"]["module.2.weight"], model.module[2].weight)
    deep_compare(model.state_dict(), other.state_dict())
