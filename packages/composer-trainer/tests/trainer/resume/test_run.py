"""Tests of the progress of a run over several calls of `fit`, across iterations and after crashes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import (
    LOADERS,
    WITH_WORKERS,
    KeepsItsPlace,
    Quiet,
    Run,
    Samples,
    all_globals,
    assert_same_end,
    batches,
)
from shared_runs import same_weights
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from composer.checkpoint.load import (
    CheckpointLoadOptions,
    load_checkpoint,
)
from composer.checkpoint.save import (
    save_checkpoint_to_disk,
)
from composer.core import Callback, DataSpec, Event, State
from composer.loggers import Logger
from composer.optim import ExponentialScheduler, LinearScheduler
from composer.testing import deep_compare
from composer.utils import reproducibility


class Lost(BaseException):
    """The process is lost."""


class Loses(Callback):
    """Loses the process at an event after the last batch."""

    def __init__(self, event: Event | None) -> None:
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and state.timestamp.batch == 12:
            raise Lost


@pytest.mark.parametrize(("save_interval", "eval_interval"), [("1ep", "6ba"), ("1ba", "1ep")])
@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.FIT_END])
def test_a_run_killed_after_its_last_batch_still_ends_its_epoch_and_evaluates_once(
    event: Event, save_interval: str, eval_interval: str, tmp_path: Path
) -> None:
    """A run in batches is over before its last epoch has ended."""

    def end(folder: str, event: Event | None, seed: int) -> dict[str, Any]:
        reproducibility.seed_all(seed)  # `Run` takes what is drawn before it begins
        loaders = [DataLoader(Samples(all_globals), 4, shuffle=True) for _ in range(2)]
        run = Run(
            loaders[0],
            schedulers=ExponentialScheduler(0.5),
            step_schedulers_every_batch=False,
            eval_dataloader=loaders[1],
            eval_interval=eval_interval,
            max_duration="12ba",
            callbacks=[Loses(event)],
            save_folder=tmp_path / folder,
            save_interval=save_interval,
            run_name="run",
            autoresume=True,
        )
        with pytest.raises(Lost) if event is not None else nullcontext():
            run.fit()
        run.trainer.close()
        return {
            "model": run.state.model.state_dict(),
            "rates": [group["lr"] for group in run.state.optimizers[0].param_groups],
            "time": [getattr(run.state.timestamp, unit).value for unit in ("batch", "epoch", "sample")],
            "rng": reproducibility.get_rng_state(),
        }

    whole = end("whole", None, 1)
    end("killed", event, 1)

    deep_compare(whole, end("killed", None, 2))


class Iterations(Callback):
    def __init__(self) -> None:
        self.ended: list[int] = []

    def iteration_end(self, state: State, logger: Logger) -> None:
        self.ended.append(state.timestamp.batch.value)


@pytest.mark.parametrize("name", ["shuffle", "own state"])
@pytest.mark.parametrize(("length", "when", "ends"), [("2ep", "2ep", [8, 16]), ("8tok", "6ba", [6, 8, 10, 12, 14])])
def test_an_iteration_that_was_about_to_end_ends_in_the_resumed_run(
    length: str, when: str, ends: list[int], name: str
) -> None:
    def make(*snapshots: str) -> tuple[Run, Iterations]:
        spec = DataSpec(LOADERS[name](), get_num_tokens_in_batch=lambda batch: len(batch[0]))
        iterations = Iterations()
        run = Run(spec, *snapshots, max_duration="16ba")
        run.state.callbacks.append(iterations)
        run.state._iteration_length = length  # type: ignore[assignment]
        return run, iterations

    whole, all_ends = make(when)
    whole.fit()
    resumed, later_ends = make()
    assert_same_end(whole, resumed.load(whole.snapshots.taken[0]).fit())

    assert ends == later_ends.ended == all_ends.ended[-len(ends) :]


@pytest.mark.parametrize("name", ["global transform", "own state"])
def test_a_second_fit_goes_on_as_if_it_were_one(name: str) -> None:
    whole = Run(LOADERS[name](), max_duration="8ba", journal=Quiet()).fit()
    parts = Run(LOADERS[name](), max_duration="3ba", journal=Quiet()).fit().fit(duration="5ba")

    deep_compare(whole.journal.batches, parts.journal.batches)
    deep_compare(whole.state.model.state_dict(), parts.state.model.state_dict())
    assert whole.state.timestamp.epoch == parts.state.timestamp.epoch


def test_a_second_fit_goes_on_with_workers_which_do_not_outlive_the_first() -> None:
    whole = Run(WITH_WORKERS["workers"](), max_duration="4ba", journal=Quiet()).fit()
    parts = Run(WITH_WORKERS["workers"](), max_duration="2ba", journal=Quiet()).fit()
    assert parts.trainer._progress.loader._iterator is None
    parts.fit(duration="2ba")

    deep_compare(whole.journal.batches, parts.journal.batches)


def test_a_fit_that_failed_is_repeated_from_the_last_finished_batch() -> None:
    class Fails(Callback):
        def before_forward(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 2 and not self.done:
                self.done = True
                raise RuntimeError("once")

        done = False

    whole = Run(DataLoader(Samples(), 4, shuffle=True)).fit()
    run = Run(DataLoader(Samples(), 4, shuffle=True), callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="once"):
        run.fit()
    run.fit()

    assert whole.journal.samples[0] == run.journal.samples[0][:12] + run.journal.samples[0][16:]


def three_fits(folder: Path, make: Callable[[], Any], second: dict[str, Any], stop: int | None) -> Run:
    callbacks = [] if stop is None else [StopsAt(stop)]
    reproducibility.seed_all(0)
    saving = {"save_folder": folder, "save_interval": "2ba", "run_name": "run", "autoresume": True}
    run = Run(make(), journal=Quiet(), callbacks=callbacks, max_duration="3ba", **saving)
    given = dict(second)
    if "train_dataloader" in given:
        given["train_dataloader"] = given["train_dataloader"]()
    with nullcontext() if stop is None else pytest.raises(InterruptedError):
        run.fit().fit(**given, duration="1ep").fit(duration="3ba")
    run.trainer.close()
    return run


class StopsAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError("crashed")


def shuffled() -> Any:
    return DataLoader(Samples(size=20), 4, shuffle=True)


SECOND: dict[str, dict[str, Any]] = {
    "loader": {"train_dataloader": shuffled},
    "loader with a state": {"train_dataloader": KeepsItsPlace},
    "subset": {"train_subset_num_batches": 2},
}


@pytest.mark.parametrize("name", SECOND)
def test_a_relaunch_resumes_a_program_whose_second_fit_has_other_data(tmp_path: Path, name: str) -> None:
    whole = three_fits(tmp_path / "whole", shuffled, SECOND[name], None)
    three_fits(tmp_path / "run", shuffled, SECOND[name], min(5, whole.state.timestamp.batch.value - 1))
    resumed = three_fits(tmp_path / "run", shuffled, SECOND[name], None)

    deep_compare(whole.state.model.state_dict(), resumed.state.model.state_dict())
    deep_compare(whole.state.optimizers[0].state_dict(), resumed.state.optimizers[0].state_dict())
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch
    assert whole.state.timestamp.epoch == resumed.state.timestamp.epoch
    count = len(resumed.journal.batches)
    deep_compare(whole.journal.batches[-count:], resumed.journal.batches)


GIVEN: dict[str, Callable[[Run], dict[str, Any]]] = {
    "schedule": lambda run: {"schedulers": ExponentialScheduler(0.5)},
    "schedule of torch": lambda run: {"schedulers": StepLR(run.state.optimizers[0], step_size=1, gamma=0.5)},
    "evaluation": lambda run: {"eval_dataloader": batches(), "eval_interval": "1ba"},
    "precision": lambda run: {"precision": "amp_bf16"},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_skipped_fit_was_given_holds_for_the_later_ones(tmp_path: Path, name: str) -> None:
    def program(folder: str, stop: int | None = None) -> Run:
        reproducibility.seed_all(0)
        callbacks = [] if stop is None else [StopsAt(stop)]
        saving = {"save_folder": tmp_path / folder, "save_interval": "2ba", "run_name": "run", "autoresume": True}
        run = Run(
            shuffled(), callbacks=callbacks, journal=Quiet(), schedulers=LinearScheduler(), max_duration="4ba", **saving
        )
        with nullcontext() if stop is None else pytest.raises(InterruptedError):
            run.fit(**GIVEN[name](run)).fit(duration="4ba").fit(duration="4ba")
        run.trainer.close()
        return run

    whole = program("whole")
    program("run", 7)
    for _ in range(2):  # the first relaunch ends the run, the second finds it complete
        resumed = program("run")
        deep_compare(whole.state.model.state_dict(), resumed.state.model.state_dict())
        deep_compare(whole.state.optimizers[0].state_dict(), resumed.state.optimizers[0].state_dict())
        deep_compare(whole.state.eval_metric_values, resumed.state.eval_metric_values)
        assert whole.state.precision is resumed.state.precision
        assert whole.state.eval_metrics.keys() == resumed.state.eval_metrics.keys()
        for label, metrics in whole.state.eval_metrics.items():
            for each, metric in metrics.items():
                assert torch.equal(metric.compute(), resumed.state.eval_metrics[label][each].compute())


def test_whoever_runs_the_loop_keeps_the_place_in_the_data(make_trainer: Any, tmp_path: Path) -> None:
    def finished(folder: Path | None) -> Any:
        trainer = make_trainer(train_dataloader=make_trainer.loader(shuffle=True))
        if folder is not None:
            everything = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True)
            load_checkpoint(folder, everything, state=trainer.state)
        trainer.fit()
        return trainer.state

    class Saver(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 3:
                save_checkpoint_to_disk(tmp_path, state)

    make_trainer(train_dataloader=make_trainer.loader(shuffle=True), callbacks=[Saver()]).fit()

    assert same_weights(finished(None).model, finished(tmp_path / "ep0-ba3").model)


def test_a_checkpoint_does_not_choose_what_it_sets(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit()
    path = trainer.save_checkpoint(str(tmp_path / "run.pt"))
    content = torch.load(path, weights_only=False)
    del content["has_checksum"]
    content["resumption"]["values"] |= {"total_loss_dict": {"loss/train/total": 7.0}, "algorithms": "elsewhere"}
    torch.save(content, path)

    resumed = make_trainer(load_path=path)

    assert {"loss/train/total": 7.0} == resumed.state.total_loss_dict
    assert "elsewhere" != resumed.state.algorithms
