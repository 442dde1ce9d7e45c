"""`ScheduleFree` in the Trainer: optimizers of the library, wrappers, schedules, overflows and interruptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import EMA, SAM, GradientClipping, LayerFreezing, Muon, ScheduleFree, SqueezeExcite
from composer.algorithms.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from composer.checkpoint import read_checkpoint
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.optim import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
    WarmupStableDecayScheduler,
)
from composer.testing import RandomClassificationDataset, SimpleConvModel, deep_compare
from composer.utils.reproducibility import seed_context

Make = Callable[[Any], Any]
DATA = RandomClassificationDataset(shape=(3, 8, 8), size=24)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def library(parameters: Any) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=4)


def two(parameters: Any) -> list[torch.optim.Optimizer]:
    parameters = list(parameters)
    return [torch.optim.AdamW(parameters[:2], lr=0.01), sgd(parameters[2:])]


def other(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5)


MAKE: dict[str, Make] = {"sgd": sgd, "library": library, "two": two, "other": other}


class Killed(Exception):
    """The process is lost."""


class Kill(Callback):
    """Ends the process at the start of a batch."""

    def __init__(self, batch: int, error: type[BaseException] = Killed) -> None:
        self.batch, self.error = batch, error

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            self.batch = -1
            raise self.error


def start(make: Make = sgd, *algorithms: Algorithm, norm: str = "batch", **options: Any) -> Trainer:
    """A run of two epochs of three batches, evaluated after each epoch."""
    with seed_context(0):
        model = SimpleConvModel(norm=norm)
    defaults: dict[str, Any] = {
        "train_dataloader": DataLoader(DATA, batch_size=8, shuffle=True),
        "eval_dataloader": DataLoader(DATA, batch_size=8),
        "max_duration": "2ep",
        "algorithms": [ScheduleFree() if make is not sgd else ScheduleFree(warmup="4ba"), *algorithms],
        "device": "cpu",
        "seed": 0,
        "progress_bar": False,
        "run_name": "run",
    }
    return Trainer(model=model, optimizers=make(model.parameters()), **{**defaults, **options})


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


class Watch(Callback):
    """Keeps the weights at the start of each batch, and in each evaluation."""

    def __init__(self) -> None:
        self.trained: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        kept = {Event.BATCH_START: self.trained, Event.EVAL_BATCH_START: self.evaluated}.get(event)
        if kept is not None:
            kept.append({name: value.clone() for name, value in state.model.state_dict().items()})


RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "SAM": {"algorithms": lambda: [SAM(rho=0.05)]},
    "microbatches": {"device_train_microbatch_size": 4, "norm": "group"},
    "bf16": {"precision": "amp_bf16"},
    "fp16": {"precision": "amp_fp16"},
    "surgery": {"algorithms": lambda: [SqueezeExcite(min_channels=1), GradientClipping("norm", 0.1)]},
    "Muon": {"algorithms": lambda: [Muon(lr=0.02)]},
    "Muon and SAM": {"algorithms": lambda: [SAM(rho=0.05), Muon(lr=0.02)]},
    "freezing": {"algorithms": lambda: [LayerFreezing(freeze_start=0.1, freeze_level=1.0)]},
}


def launch(make: Make, run: dict[str, Any], folder: Path | None, interval: str, **options: Any) -> Any:
    run = dict(run)
    more = run.pop("algorithms", list)()
    saves = {} if folder is None else {"save_folder": folder, "save_interval": interval, "autoresume": True}
    trainer = start(make, *more, **saves, **run, **options)
    trainer.fit()
    found = weights(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("interval", ["1ba", "1ep"])
@pytest.mark.parametrize(
    ("make", "run"),
    [*((MAKE[name], RUNS["alone"]) for name in MAKE), *((sgd, RUNS[name]) for name in RUNS if name != "alone")],
    ids=[*MAKE, *(name for name in RUNS if name != "alone")],
)
@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NotIntendedUseWarning")
def test_memory_file_and_relaunch_agree(make: Make, run: dict[str, Any], interval: str, tmp_path: Path) -> None:
    never_saved = launch(make, run, None, interval)
    whole = launch(make, run, tmp_path / "whole", interval)
    with pytest.raises(Killed):
        launch(make, run, tmp_path / "killed", interval, callbacks=Kill(4))
    resumed = launch(make, run, tmp_path / "killed", interval)

    deep_compare(never_saved, whole)
    deep_compare(whole, resumed)
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        deep_compare(whole, read_checkpoint(folder / "latest-rank0.pt")["state"]["model"])
        deep_compare(whole, launch(make, run, folder, interval))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_evaluations_and_a_second_fit_do_not_change_training(make: Make) -> None:
    watched = [Watch(), Watch()]
    # In order: to iterate a loader for an evaluation draws from the generator of the order.
    in_order = {"train_dataloader": DataLoader(DATA, batch_size=8)}
    whole = start(make, callbacks=watched[0], eval_dataloader=None, **in_order)
    halves = start(make, callbacks=watched[1], max_duration="4ba", eval_interval="1ba", **in_order)
    whole.fit()
    halves.fit()
    deep_compare(watched[1].evaluated[-1], weights(halves))
    halves.predict(DataLoader(DATA, batch_size=8))
    halves.eval()
    halves.fit(duration="2ba")

    deep_compare(watched[0].trained, watched[1].trained)
    deep_compare(weights(whole), weights(halves))
    for trainer in (whole, halves):
        assert not any(group["train_mode"] for o in trainer.state.optimizers for group in o.param_groups)
        trainer.close()


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_average_is_in_the_model_after_an_interrupted_fit(make: Make) -> None:
    watch = Watch()
    trainer = start(make, callbacks=[watch, Kill(4, KeyboardInterrupt)], norm="group")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    whole = start(make, max_duration="4ba", norm="group")
    whole.fit()

    deep_compare(weights(whole), weights(trainer))
    trainer.fit()
    deep_compare(watch.trained[4], watch.trained[5])  # the batch that was interrupted is trained with y
    trainer.close()
    whole.close()


class OverflowsOnce(Callback):
    """Lets the gradients of the second batch overflow, and keeps the weights and step counts after each batch."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.steps: list[int] = []

    def after_loss(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 1:
            state.loss = state.loss * 1e38

    def batch_end(self, state: State, logger: Logger) -> None:
        self.weights.append(torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().clone())
        self.steps.append(state.optimizers[0].param_groups[0]["k"])


@pytest.mark.filterwarnings("ignore:The warmup of `ScheduleFree` takes 4 batches")  # longer than three batches
@pytest.mark.parametrize("make", [sgd, library])
def test_a_step_that_overflows_is_skipped(make: Make) -> None:
    watch = OverflowsOnce()
    trainer = start(make, callbacks=watch, precision="amp_fp16", max_duration="3ba")
    trainer.fit()
    first, second, third = watch.weights

    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert bool(third.isfinite().all())
    assert watch.steps == [1, 1, 2]
    trainer.close()


@pytest.mark.parametrize(
    "schedule",
    [
        CosineAnnealingScheduler(),
        LinearWithWarmupScheduler("2ba"),
        WarmupStableDecayScheduler("1ba", t_decay="3ba"),
        lambda state, ssr=1.0: 0.5 ** int(state.timestamp.epoch),
        ConstantScheduler(alpha=2.0, t_max="4ba"),
    ],
    ids=["cosine", "linear", "stable", "function", "constant at first"],
)
def test_schedules_that_fall_are_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match="`schedulers` must not lower the learning rate with `ScheduleFree`"):
        start(schedulers=schedule)


@pytest.mark.parametrize("schedule", [ConstantScheduler(), ConstantWithWarmupScheduler("3ba")])
def test_constant_schedules_are_followed(schedule: Any) -> None:
    trainer = start(schedulers=schedule)
    trainer.fit()
    (group,) = trainer.state.optimizers[0].param_groups

    assert group["lr"] == pytest.approx(0.1)
    trainer.close()


def test_methods_that_do_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="ScheduleFree"):
        start(sgd, EMA())


def test_muon_and_sgd_move_z_as_in_the_wrappers_of_the_library() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    in_order = {"train_dataloader": DataLoader(DATA, batch_size=8), "eval_dataloader": None}
    muon = {"lr": 0.02, "weight_decay": 0.1}
    trainer = start(make, algorithms=[ScheduleFree(), Muon(**muon)], norm="group", **in_order)
    reference = start(make, algorithms=[Muon(**muon)], norm="group", **in_order)
    trainer.fit()
    wrappers = [schedulefree.ScheduleFreeWrapper(each, momentum=0.9) for each in reference.state.optimizers]
    model = reference.state.model
    for wrapper in wrappers:
        wrapper.train()
    for batch in [*in_order["train_dataloader"]] * 2:
        model.zero_grad()
        model.loss(model(batch), batch).backward()
        for wrapper in wrappers:
            wrapper.step()
    for wrapper in wrappers:
        wrapper.eval()

    assert len(wrappers) == 2
    deep_compare(weights(reference), weights(trainer), atol=1e-5, rtol=1e-5)  # float32, in another order
    trainer.close()


def test_the_optimizers_are_replaced_by_those_that_are_wrapped() -> None:
    trainer = start(two, SAM())
    (wrapper,) = [o for o in trainer.state.optimizers if hasattr(o, "base_optimizer")]

    assert isinstance(wrapper.base_optimizer, ScheduleFreeAdamW)
    assert isinstance(trainer.state.optimizers[1], ScheduleFreeSGD)
    trainer.close()


def test_decoupled_weight_decay_must_be_given() -> None:
    def make(parameters: Any) -> Any:
        return DecoupledAdamW(parameters, lr=0.01, weight_decay=1e-3)

    with pytest.raises(ValueError, match="`weight_decay` must be given to replace DecoupledAdamW"):
        start(make)
    trainer = start(make, algorithms=[ScheduleFree(weight_decay=0.1)])
    trainer.fit()
    trainer.close()
