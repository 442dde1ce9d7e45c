"""For all that follows the length of a run, n seconds with batches of one second each are n batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import LANGUAGE, Captioned, Classifier, captioned, make, noise
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.callbacks import RuntimeEstimator, SpeedMonitor
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.loggers.run_recorder import RunRecorder
from composer.report import read_run, write_report
from composer.testing import deep_compare

LENGTH, BATCHES = 3, 8  # of an epoch, and of the run
# Of all that ask how far the run is, with arguments with which they ask.
BY_LENGTH: dict[str, dict[str, Any]] = {
    "EMA": {"half_life": "2ba", "ema_start": "0.25dur"},
    "GyroDropout": {"p": 0.25, "sigma": 8, "tau": 2},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 1.0},
    "ProgressiveResizing": {"delay_fraction": 0.25, "finetune_fraction": 0.25, "size_increment": 2},
    "SWA": {"swa_start": "0.5dur", "swa_end": "0.75dur", "update_interval": "1ba"},
    "ScaleSchedule": {"ratio": 0.5},
    "SelectiveBackprop": {"start": 0.25, "end": 0.75, "interrupt": 0},
    "SeqLengthWarmup": {"duration": 0.5, "min_seq_length": 8, "max_seq_length": 16, "step_size": 2},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.5, "drop_warmup": 0.5},
}


class Clock:
    """Stands for the module `time` in `composer.trainer.loop`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class LastsASecond(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def batch_start(self, state: State, logger: Logger) -> None:
        self.clock.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr("composer.trainer.loop.time", stopped)
    return stopped


def train(clock: Clock, duration: str, name: str, loggers: Any, *callbacks: Callback) -> Trainer:
    model = Captioned() if name in LANGUAGE else Classifier()
    keys = {"input_key": "image", "target_key": "label"} if name in LANGUAGE else {}
    loader: Any = DataLoader(
        noise(2 * LENGTH), batch_size=2, shuffle=True, collate_fn=captioned if name in LANGUAGE else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration=duration,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            algorithms=make(name, keys, BY_LENGTH[name]),
            callbacks=[LastsASecond(clock), *callbacks],
            loggers=loggers,
            progress_bar=False,
            device="cpu",
            seed=1,
            run_name="run",
        )
        trainer.fit()
    return trainer


@pytest.mark.parametrize("name", sorted(BY_LENGTH))
def test_algorithms_act_at_the_same_part_of_the_run(clock: Clock, name: str) -> None:
    acted = InMemoryLogger(), InMemoryLogger()
    runs = [train(clock, f"{BATCHES}{unit}", name, log) for unit, log in zip(("sec", "ba"), acted, strict=True)]

    assert runs[0].state.timestamp == runs[1].state.timestamp
    deep_compare(*(run.state.model.state_dict() for run in runs))
    deep_compare(*(run.state.state_dict()["algorithms"] for run in runs))
    assert acted[0].data.keys() >= {"loss/train/total"}
    deep_compare(*({key: [value for _, value in pairs] for key, pairs in log.data.items()} for log in acted))


def test_what_is_estimated_and_recorded(clock: Clock, tmp_path: Path) -> None:
    log, recorder = InMemoryLogger(), RunRecorder(folder=str(tmp_path))
    run = train(clock, "8sec", "EMA", [log, recorder], SpeedMonitor(window_size=2), RuntimeEstimator())
    run.close()

    assert 1.0 == log.most_recent_values["throughput/batches_per_sec"]
    assert 0.0 == log.most_recent_values["time/remaining_estimate"]
    recorded = read_run(tmp_path)
    assert ("8sec", 8, "finished") == (recorded.max_duration, recorded.batches, recorded.status)
    assert write_report(tmp_path, tmp_path / "report.html").is_file()
