"""Callbacks and loggers alone, with each other, all together: several fits, resumption, a close without a fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observers import KEEPERS, WATCHERS, Keeper, Watcher, make_trainer, names

from composer.core import Callback
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".* only works on CUDA devices:UserWarning",
        "The ``noload`` loader strategy:DeprecationWarning",  # of MLflow's own
        "For backward compatibility, 'str' dtypes",  # likewise
        "jsonschema.RefResolver is deprecated:DeprecationWarning",  # of Neptune's client
    )
]

APART = {"FreeOutputs", "Generate", "LoadCheckpoint", "CheckpointSaver"}  # want a model, or a saver, of their own
METRICS = [watcher.metric for name, watcher in WATCHERS.items() if name not in APART and watcher.metric is not None]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    for name in ("RUN_NAME", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_all_are_here() -> None:
    assert names("composer.callbacks") == sorted(WATCHERS)
    assert names("composer.loggers") == sorted(KEEPERS)


@pytest.mark.parametrize("callback", WATCHERS)
def test_every_callback_runs_alone(callback: str, tmp_path: Path) -> None:
    watcher, keeper = WATCHERS[callback], KEEPERS["RunRecorder"](tmp_path)
    run([watcher], [watcher.make(tmp_path)], keeper, watcher.model)


@pytest.mark.parametrize("logger", KEEPERS)
def test_every_logger_keeps_what_the_callbacks_log(logger: str, tmp_path: Path) -> None:
    watchers = [watcher for name, watcher in WATCHERS.items() if name not in APART]
    run(watchers, [watcher.make(tmp_path) for watcher in watchers], KEEPERS[logger](tmp_path), {})


def run(watchers: list[Watcher], callbacks: list[Callback], keeper: Keeper, model: dict[str, Any]) -> None:
    trainer = make_trainer(callbacks, keeper.logger, model=model)
    trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == "4ba"
    if keeper.has is None:
        return
    assert keeper.has("loss/train/total")
    for watcher in watchers:
        kept = {watcher.metric: True, watcher.image: keeper.images, watcher.table: keeper.tables}
        assert all(keeper.has(name) for name, wanted in kept.items() if name is not None and wanted)


def together(folder: Path) -> tuple[list[Callback], list[Keeper]]:
    """All callbacks that go with each other, and all loggers."""
    callbacks = [watcher.make(folder) for name, watcher in WATCHERS.items() if name not in APART]
    return callbacks, [make(folder) for make in KEEPERS.values()]


def test_all_of_them_together_over_several_fits_and_a_resumption(tmp_path: Path) -> None:
    saved = {"save_folder": str(tmp_path / "saved"), "save_interval": "1ba"}
    callbacks, keepers = together(tmp_path)
    trainer = make_trainer(callbacks, [keeper.logger for keeper in keepers], **saved)
    trainer.fit()
    trainer.eval()
    trainer.fit(duration="1ep")
    trainer.close()
    trainer.close()
    assert trainer.state.timestamp.batch == "6ba"
    first = set(log(tmp_path))

    callbacks, keepers = together(tmp_path)
    path = str(tmp_path / "saved" / "ep2-ba5-rank0.pt")
    resumed = make_trainer(callbacks, [keeper.logger for keeper in keepers], max_duration="4ep", load_path=path)
    resumed.fit()
    resumed.close()
    assert resumed.state.timestamp.batch == "8ba"
    assert set(log(tmp_path)) > first
    for keeper in keepers:
        for name in METRICS:
            assert keeper.has is None or keeper.has(name), (type(keeper.logger), name)


def test_all_of_them_together_are_closed_without_a_fit(tmp_path: Path) -> None:
    callbacks, keepers = together(tmp_path)
    trainer = make_trainer(callbacks, [keeper.logger for keeper in keepers])
    trainer.close()
    trainer.close()


@pytest.mark.filterwarnings("ignore:The profiler is enabled:UserWarning")
def test_a_run_with_all_loggers_is_profiled(tmp_path: Path) -> None:
    keepers = [make(tmp_path) for make in KEEPERS.values()]
    schedule = cyclic_schedule(warmup=0, active=2)
    profiler = Profiler(
        schedule, [JSONTraceHandler(str(tmp_path / "traces"))], torch_prof_folder=str(tmp_path / "torch")
    )
    trainer = make_trainer([], [keeper.logger for keeper in keepers], profiler=profiler)
    trainer.fit()
    trainer.close()
    begun = {event["name"] for event in json.loads((tmp_path / "traces" / "merged_trace.json").read_text())}
    assert "event/batch" in begun
    assert all(keeper.has is None or keeper.has("loss/train/total") for keeper in keepers)


def log(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()
