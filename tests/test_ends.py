"""The end of a run: the weights in memory, in the newest checkpoint and after a relaunch are the same.

So are the metrics, whenever checkpoints are saved, and whether or not the run was killed.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import (
    ARGUMENTS,
    CLASSES,
    Classifier,
    make,
    noise,
)
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchvision.transforms import ToTensor

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.checkpoint import read_checkpoint
from composer.core import Callback, Event, State
from composer.core.effects import AVERAGES_WEIGHTS
from composer.loggers import Logger
from composer.testing import deep_compare

LENGTH = 3  # batches in an epoch
INTERVALS = ["1ba", "4ba", "1dur"]  # every batch, every few batches, at the end only
# Those whose last act comes with the end of an epoch or of the run, in a run of some length.
LATE: dict[str, tuple[str, dict[str, Any], str]] = {
    "EMA by epochs": ("EMA", {"half_life": "1ep"}, "2ep"),
    "EMA, ending in mid-epoch": ("EMA", {"half_life": "2ba"}, "5ba"),
    "SWA of batches": ("SWA", {"update_interval": "1ba"}, "4ep"),
    "SWA of epochs": ("SWA", {"swa_start": "0.2dur"}, "3ep"),
    "SWA, ending in mid-epoch": ("SWA", {"swa_start": "0.2dur"}, "5ba"),
    "LayerFreezing": ("LayerFreezing", {"freeze_start": 0.0, "freeze_level": 1.0}, "2ep"),
}
# What else could differ at the end: averages of weights, and two that act in the batch and on the optimizer. That a run
# with any other algorithm resumes exactly is shown in `test_algorithm_resumption`.
ENDING = sorted(name for name in CLASSES if AVERAGES_WEIGHTS in make(name, {}).placement.provides)
CASES = {name: (name, ARGUMENTS.get(name, {}), "2ep") for name in (*ENDING, "CutMix", "SAM")} | LATE


class Killed(Exception):
    """The process is lost."""


class Kill(Callback):
    """Ends the process at the start of a batch."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            raise Killed


class Measured(Classifier):
    """With a metric that shows the slightest difference."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Mean": MeanMetric(nan_strategy=0.0)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs.float())


def launch(
    case: str,
    folder: Path,
    interval: str,
    kill: int | None = None,
    callback: Callback | None = None,
    more: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Launch a run's program, and return what it ends with in memory and in its newest checkpoint.

    With `more`, the program fits again, for that duration.
    """
    name, arguments, duration = CASES[case]
    model = Measured()
    training, measuring = (noise(2 * LENGTH, ToTensor()) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(training, batch_size=2, shuffle=True),
            eval_dataloader=DataLoader(measuring, batch_size=6),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            algorithms=make(name, {}, arguments),
            callbacks=Kill(kill) if callback is None else callback,
            progress_bar=False,
            device="cpu",
            seed=1,
            run_name="run",
            save_folder=folder,
            save_interval=interval,
            **{"autoresume": True, "max_duration": duration, **options},
        )
        trainer.fit()
        if more is not None:
            trainer.fit(duration=more)
    state = trainer.state
    found = {
        "weights": {key: value.clone() for key, value in state.model.state_dict().items()},
        "metrics": dict(state.eval_metric_values),
        "computed": {key: metric.compute() for key, metric in state.eval_metrics["eval"].items()},
        "batch": state.timestamp.batch.value,
        "epoch": state.timestamp.epoch.value,
        "max_duration": str(state.max_duration),
        "algorithms": state.state_dict()["algorithms"],
    }
    trainer.close()
    return found


def weights_of(folder: Path) -> Any:
    return read_checkpoint(folder / "latest-rank0.pt")["state"]["model"]


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("case", CASES)
def test_memory_file_and_relaunch_agree(case: str, interval: str, tmp_path: Path) -> None:
    whole = launch(case, tmp_path / "whole", interval)
    with pytest.raises(Killed):
        launch(case, tmp_path / "killed", interval, kill=4)
    resumed = launch(case, tmp_path / "killed", interval)

    deep_compare(whole, resumed)
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        deep_compare(whole["weights"], weights_of(folder))
        deep_compare(whole, launch(case, folder, interval))


@pytest.mark.parametrize("case", LATE)
def test_a_run_killed_in_its_last_moments_ends_like_any_other(case: str, tmp_path: Path) -> None:
    """After its last checkpoint is saved, but before what follows has happened."""
    whole = launch(case, tmp_path / "whole", "1ba")
    with pytest.raises(Killed):
        launch(case, tmp_path / "killed", "1ba", callback=KillAtTheEnd(whole["batch"]))
    resumed = launch(case, tmp_path / "killed", "1ba")

    deep_compare(whole, resumed)
    deep_compare(whole["weights"], weights_of(tmp_path / "killed"))
    deep_compare(whole, launch(case, tmp_path / "killed", "1ba"))


class KillAtTheEnd(Callback):
    """Ends the process when the last batch was saved: at whatever comes next."""

    def __init__(self, last: int) -> None:
        self.last = last

    def epoch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.last:
            raise Killed

    def fit_end(self, state: State, logger: Logger) -> None:
        raise Killed


STOPS = {  # by event: the batch, counted when it happens, and the run's `eval_interval`
    Event.BATCH_START: (3, "1ep"),
    Event.BATCH_END: (4, "1ep"),
    Event.EVAL_END: (4, "2ba"),
    Event.EPOCH_END: (3, "1ep"),
}
STOPPED = ["EMA", "SWA of batches"]


class Stop(Callback):
    """Stops the run once, as `EarlyStopper` does; may end the process at a later event."""

    def __init__(self, event: Event, dies: Event | None = None) -> None:
        self.event, self.batch, self.dies = event, STOPS[event][0], dies
        self.has_stopped = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if self.has_stopped and event is self.dies:
            raise Killed
        if event is self.event and state.timestamp.batch == self.batch:
            state.stop_training()
            self.has_stopped = True


@pytest.mark.parametrize("interval", INTERVALS[1:])
@pytest.mark.parametrize("event", STOPS, ids=str)
@pytest.mark.parametrize("case", STOPPED)
def test_a_run_that_was_stopped_is_complete(case: str, event: Event, interval: str, tmp_path: Path) -> None:
    options = {"eval_interval": STOPS[event][1]}
    whole = launch(case, tmp_path / "whole", interval, callback=Stop(event), **options)
    with pytest.raises(Killed):
        launch(case, tmp_path / "killed", interval, callback=Stop(event, dies=Event.FIT_END), **options)

    assert whole["batch"] == (3 if event is Event.EPOCH_END else 4)
    deep_compare(whole, launch(case, tmp_path / "killed", interval, callback=Stop(event), **options))
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        deep_compare(whole["weights"], weights_of(folder))
        deep_compare(whole, launch(case, folder, interval, callback=Stop(event), **options))


@pytest.mark.parametrize("dies", [None, Event.FIT_END])
@pytest.mark.parametrize("event", STOPS, ids=str)
def test_a_stopped_run_that_is_made_longer_goes_on(event: Event, dies: Event | None, tmp_path: Path) -> None:
    options = {"eval_interval": STOPS[event][1]}
    never_stopped = launch("CutMix", tmp_path / "whole", "1ba", max_duration="3ep", **options)
    with pytest.raises(Killed) if dies is not None else nullcontext():
        launch("CutMix", tmp_path / "run", "1ba", callback=Stop(event, dies), **options)
    longer = launch("CutMix", tmp_path / "run", "1ba", max_duration="3ep", **options)

    assert longer["batch"] == 3 * LENGTH
    deep_compare(never_stopped, longer)


@pytest.mark.parametrize("event", STOPS, ids=str)
def test_a_second_fit_goes_on_after_a_stop(event: Event, tmp_path: Path) -> None:
    options = {"eval_interval": STOPS[event][1], "more": "2ba"}
    whole = launch("EMA", tmp_path / "whole", "1ba", callback=Stop(event), **options)
    with pytest.raises(Killed):
        launch("EMA", tmp_path / "killed", "1ba", callback=Stop(event, dies=Event.BATCH_START), **options)

    assert whole["batch"] == (5 if event is Event.EPOCH_END else 6)
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        deep_compare(whole, launch("EMA", folder, "1ba", callback=Stop(event), **options))


@pytest.mark.parametrize("interval", INTERVALS)
def test_metrics_outlive_a_run_killed_before_fit_returns(interval: str, tmp_path: Path) -> None:
    whole = launch("EMA", tmp_path / "whole", interval)
    with pytest.raises(Killed):
        launch("EMA", tmp_path / "killed", interval, callback=KillAtFitEnd())

    for _ in range(2):
        deep_compare(whole, launch("EMA", tmp_path / "killed", interval))


class KillAtFitEnd(Callback):
    """Ends the process when all that remains is to say in the checkpoint that the run is complete."""

    def fit_end(self, state: State, logger: Logger) -> None:
        raise Killed


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("case", LATE)
def test_it_does_not_need_autoresume(case: str, interval: str, tmp_path: Path) -> None:
    ended = launch(case, tmp_path, interval, autoresume=False)

    deep_compare(ended["weights"], weights_of(tmp_path))


@pytest.mark.parametrize("case", ["SWA of batches", "SWA, ending in mid-epoch"])
def test_the_average_becomes_the_weights_of_the_model(case: str, tmp_path: Path) -> None:
    (_, swa) = launch(case, tmp_path, "1dur")["algorithms"][0]

    assert swa["swa_completed"]
