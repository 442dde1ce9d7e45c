"""Tests of the settings of a run: schedules, training data and evaluators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_runs import generated
from torch.utils.data import DataLoader, TensorDataset

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core import Callback, DataSpec, Evaluator, State
from composer.devices import DeviceCPU
from composer.loggers import Logger
from composer.optim import ConstantScheduler, LinearScheduler
from composer.testing import deep_compare
from composer.trainer.options import Arguments

MakeTrainer = Any  # the fixture's class, in conftest.py


def test_arguments_of_the_constructor_and_of_fit_are_the_same(make_trainer: MakeTrainer) -> None:
    at_init = make_trainer(
        eval_dataloader=make_trainer.loader(8),
        eval_interval="2ba",
        schedulers=LinearScheduler(),
        device_train_microbatch_size=2,
        train_subset_num_batches=3,
    )
    at_init.fit()
    at_fit = make_trainer(train_dataloader=None, max_duration=None)
    at_fit.fit(
        train_dataloader=make_trainer.loader(),
        duration="2ep",
        eval_dataloader=make_trainer.loader(8),
        eval_interval="2ba",
        schedulers=LinearScheduler(),
        device_train_microbatch_size=2,
        train_subset_num_batches=3,
    )
    wct = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")

    deep_compare(at_init.state.model.state_dict(), at_fit.state.model.state_dict())
    deep_compare(at_init.state.optimizers[0].state_dict(), at_fit.state.optimizers[0].state_dict())
    deep_compare(at_init.state.timestamp.state_dict(), at_fit.state.timestamp.state_dict(), ignore_keys=wct)
    assert at_init.state.eval_metric_values == at_fit.state.eval_metric_values


class NamedGPU(DeviceCPU):
    """A CPU that the run takes for a GPU, where there is none."""

    name = "gpu"


def loaders(num_workers: int) -> list[DataLoader[Any]]:
    dataset = TensorDataset(torch.rand(8, 1, 6, 6), torch.zeros(8, dtype=torch.long))
    return [DataLoader(dataset, batch_size=4, num_workers=num_workers) for _ in range(2)]


@pytest.mark.parametrize(
    ("device", "num_workers", "pinned"), [(NamedGPU(), 1, True), (NamedGPU(), 0, False), (DeviceCPU(), 1, False)]
)
def test_workers_pin_batches_for_a_gpu(
    make_trainer: MakeTrainer, device: DeviceCPU, num_workers: int, pinned: bool
) -> None:
    train, evaluation = loaders(num_workers)
    trainer = make_trainer(train_dataloader=train, eval_dataloader=evaluation, device=device, precision="fp32")

    assert (train.pin_memory, evaluation.pin_memory) == (pinned, pinned)
    replaced, other = loaders(num_workers)
    trainer._settings.set_train_data(
        Arguments(
            train_dataloader=DataSpec(replaced),
            train_dataloader_label=None,
            train_subset_num_batches=None,
            device_train_microbatch_size=None,
        )
    )
    assert replaced.pin_memory is pinned
    assert other.pin_memory is False


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def test_schedules_step_every_batch(make_trainer: MakeTrainer) -> None:
    rates = Rates()
    make_trainer(schedulers=LinearScheduler(), callbacks=rates, max_duration="1ep").fit()

    # The rate of a batch is set while the time is still that of the batch before it.
    assert rates.rates == pytest.approx([0.1, 0.1, 0.075, 0.05])


def test_a_second_fit_continues_at_the_last_factor_of_a_schedule(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(schedulers=LinearScheduler(alpha_f=0.5, t_max="2ep"), max_duration="2ep")
    trainer.fit()
    trainer.fit(duration="1ep")

    assert trainer.state.schedulers[0].get_last_lr() == [pytest.approx(0.05)]
    assert trainer.state.timestamp.epoch == 3


@pytest.mark.parametrize(("every_batch", "expected"), [(None, [0.1] * 4 + [0.01] * 4), (True, None)])
def test_torch_schedules_step_every_epoch_unless_told(
    make_trainer: MakeTrainer, every_batch: bool | None, expected: list[float] | None
) -> None:
    rates, model = Rates(), make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        step_schedulers_every_batch=every_batch,
        callbacks=rates,
    ).fit()

    assert rates.rates == pytest.approx(expected if expected is not None else [0.1 * 0.1**i for i in range(8)])


def one_cycle(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def cosine(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@pytest.mark.parametrize("max_duration", ["2ep", "8ba"])
@pytest.mark.parametrize(
    ("make", "every_batch", "message"),
    [
        (
            one_cycle(8),
            None,
            r"`OneCycleLR` has total_steps=8, the number of batches .* 2 times. Pass `step_sched.*=True`",
        ),
        (
            cosine(8),
            None,
            "`CosineAnnealingLR` has T_max=8, the number of batches of the run, but it is stepped once per epoch, 2",
        ),
        (one_cycle(2), True, "total_steps=2, the number of epochs .* stepped once per batch, 8 times. Leave out `step"),
        (cosine(2), True, "T_max=2, the number of epochs of the run, but it is stepped once per batch, 8 times"),
        (
            one_cycle(5),
            True,
            "total_steps=5 and raises an error after that many steps, but it is stepped once per batch, 8 times. Pass",
        ),
        (
            one_cycle(1),
            None,
            "total_steps=1 and raises an error after that many steps, but it is stepped once per epoch, 2 times",
        ),
    ],
)
def test_a_torch_schedule_of_the_length_of_other_steps_warns(
    make_trainer: MakeTrainer, make: Any, every_batch: bool | None, message: str, max_duration: str
) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizers": optimizer, "max_duration": max_duration}

    with pytest.warns(UserWarning, match=message) as caught:
        make_trainer(**given, schedulers=make(optimizer), step_schedulers_every_batch=every_batch)

    assert len(caught) == 1


@pytest.mark.parametrize(("make", "every_batch"), [(one_cycle(2), None), (one_cycle(8), True), (cosine(3), None)])
def test_a_torch_schedule_that_fits_its_steps_does_not_warn(
    make_trainer: MakeTrainer, make: Any, every_batch: bool | None
) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_trainer(
        model=model, optimizers=optimizer, schedulers=make(optimizer), step_schedulers_every_batch=every_batch
    ).fit()


def test_the_schedule_ratio_scales_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0.75, max_duration="10ep")

    assert "7ep" == str(trainer.state.max_duration)
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` 0.01 makes `max_duration` '10ep' zero"):
        make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0.01, max_duration="10ep")
    with pytest.raises(ValueError, match=r"must be 1.0 without `schedulers`"):
        make_trainer(scale_schedule_ratio=0.5)
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` must be positive"):
        make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0)
    with pytest.raises(ValueError, match=r"`step_schedulers_every_batch` has no effect"):
        make_trainer(step_schedulers_every_batch=True)


@pytest.mark.parametrize(("first", "second", "ratio", "ends"), [("4ep", "2ep", 0.5, 3), ("2ep", "1ep", 2.0, 6)])
def test_the_schedule_ratio_of_fit_scales_what_it_trains(
    make_trainer: MakeTrainer, first: str, second: str, ratio: float, ends: int
) -> None:
    trainer = make_trainer(max_duration=None)
    for duration in (first, second):
        trainer.fit(duration=duration, schedulers=ConstantScheduler(), scale_schedule_ratio=ratio)
    assert ends == trainer.state.timestamp.epoch

    trainer = make_trainer(max_duration=first)  # in two parts, without `duration`
    trainer.fit(duration="1ep")
    trainer.state.max_duration = "5ep"
    trainer.fit(schedulers=ConstantScheduler(), scale_schedule_ratio=ratio)
    assert 1 + 4 * ratio == trainer.state.timestamp.epoch
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` 0.5 makes `duration` '1ep' zero"):
        trainer.fit(duration="1ep", schedulers=ConstantScheduler(), scale_schedule_ratio=0.5)


def endless_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


@pytest.mark.parametrize(
    "scheduler",
    [
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda optimizer: [endless_rate(optimizer), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)],
    ],
    ids=["alone", "in a list"],
)
def test_schedulers_that_are_stepped_with_a_metric_are_refused(make_trainer: MakeTrainer, scheduler: Any) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"got ReduceLROnPlateau, whose `step\(metrics\)` needs one. Use a schedule"):
        make_trainer(model=model, optimizers=optimizer, schedulers=scheduler(optimizer))


class Both(torch.optim.Optimizer):
    """Steps two optimizers, as users make one of several."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def test_schedulers_of_another_optimizer_are_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    sequence = torch.optim.lr_scheduler.SequentialLR(other, [endless_rate(other), endless_rate(other)], [1])
    for scheduler in (endless_rate(other), sequence, [endless_rate(mine), endless_rate(other)]):
        with pytest.raises(ValueError, match=r"belongs to another SGD; the run trains with SGD. Create the scheduler"):
            make_trainer(model=model, optimizers=mine, schedulers=scheduler)
    trainer = make_trainer(model=model, optimizers=mine)
    with pytest.raises(ValueError, match=r"belongs to another SGD"):
        trainer.fit(schedulers=endless_rate(other))


def test_schedulers_of_a_wrapped_optimizer_are_its_own(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.fc1, model.fc2))
    schedulers = [torch.optim.lr_scheduler.StepLR(part, 1, gamma=0.1) for part in (first, second)]
    trainer = make_trainer(model=model, optimizers=Both(first, second), schedulers=schedulers, max_duration="1ep")
    trainer.fit()

    assert [pytest.approx(0.01)] * 2 == [part.param_groups[0]["lr"] for part in (first, second)]


@pytest.mark.parametrize(
    "once", [generated, iter, lambda loader: map(list, loader), lambda loader: (b for b in loader)]
)
def test_several_epochs_of_a_generator_are_refused_at_construction(make_trainer: MakeTrainer, once: Any) -> None:
    batches = list(make_trainer.loader())
    with pytest.raises(ValueError, match=r"`train_dataloader` must be .* iterated 2 times for `max_duration` '2ep'"):
        make_trainer(train_dataloader=once(batches))
    with pytest.raises(ValueError, match=r"`train_dataloader` must be .* iterated 3 times for `max_duration` '3ep'"):
        make_trainer(train_dataloader=once(batches), max_duration=None).fit(duration="3ep")
    with pytest.raises(ValueError, match=r"`eval_dataloader` must be .* can be iterated only once. Pass a"):
        make_trainer(eval_dataloader=once(batches), eval_subset_num_batches=2)


@pytest.mark.filterwarnings("ignore:`train_dataloader` is a generator without a length:UserWarning")
def test_a_generator_may_be_trained_for_one_epoch_or_less(make_trainer: MakeTrainer) -> None:
    for duration in ("1ep", "3ba"):
        trainer = make_trainer(train_dataloader=generated(make_trainer.loader()), max_duration=duration)
        trainer.fit()

        assert trainer.state.max_duration == trainer.state.timestamp.get(duration[-2:])


def test_evaluators_are_not_mixed_with_loaders(make_trainer: MakeTrainer) -> None:
    loader = make_trainer.loader()
    mixed = [Evaluator(label="a", dataloader=loader), loader]
    with pytest.raises(ValueError, match=r"Mixing Evaluator with other classes is not allowed, please wrap"):
        make_trainer(eval_dataloader=mixed)


def test_two_evaluators_of_one_label_are_refused(make_trainer: MakeTrainer) -> None:
    evaluators = [Evaluator(label="a", dataloader=make_trainer.loader()) for _ in range(2)]
    with pytest.raises(ValueError, match=r"labels of evaluators must differ, got 'a' twice"):
        make_trainer(eval_dataloader=evaluators)


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_plain_eval_loaders_are_numbered_with_a_warning(make_trainer: MakeTrainer, kind: type) -> None:
    loaders = [make_trainer.loader() for _ in range(3)]
    with pytest.warns(UserWarning, match=r"labeled 'eval', 'eval_1', 'eval_2'. Wrap each") as caught:
        trainer = make_trainer(eval_dataloader=kind(loaders))
    trainer.fit()

    assert [evaluator.label for evaluator in trainer.state.evaluators] == ["eval", "eval_1", "eval_2"]
    assert [evaluator.dataloader.dataloader for evaluator in trainer.state.evaluators] == loaders
    assert list(trainer.state.eval_metrics) == ["eval", "eval_1", "eval_2"]
    assert caught[0].filename.endswith("conftest.py")  # where `Trainer(...)` stands


def test_a_list_of_batches_is_one_eval_loader(make_trainer: MakeTrainer) -> None:
    batches = list(make_trainer.loader())
    trainer = make_trainer(eval_dataloader=batches)

    assert [evaluator.label for evaluator in trainer.state.evaluators] == ["eval"]


def test_arguments_without_effect_are_told_together(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    message = (
        "Arguments have no effect: `train_subset_num_batches` without `train_dataloader`; `eval_interval`, "
        "`eval_subset_num_batches` without `eval_dataloader`; `console_stream` without `progress_bar` or "
        "`log_to_console`; `load_weights_only`, `load_strict_model_weights` without `load_path` or `autoresume`; "
        "`save_filename`, `save_overwrite`, `save_interval`, `save_num_checkpoints_to_keep` without `save_folder`. "
        "Leave them out, or add what they need."
    )
    with pytest.warns(UserWarning, match="Arguments have no effect") as caught:
        make_trainer(
            train_dataloader=None,
            train_subset_num_batches=2,
            eval_interval="2ba",
            eval_subset_num_batches=2,
            console_stream="stdout",
            load_weights_only=True,
            load_strict_model_weights=False,
            save_filename="{batch}.pt",
            save_overwrite=True,
            save_interval=2,
            save_num_checkpoints_to_keep=np.int64(2),
        )
    assert [message] == [str(each.message) for each in caught]
    assert caught[0].filename.endswith("conftest.py")  # where `Trainer(...)` stands
    with pytest.warns(
        UserWarning, match="effect: `save_folder`, `save_interval` with a `CheckpointSaver` in `callbacks`"
    ):
        make_trainer(callbacks=CheckpointSaver(tmp_path), save_folder=tmp_path, save_interval="2ba")
    make_trainer(eval_interval=0, train_subset_num_batches=np.int64(-1), save_metrics=True)


def test_all_wrong_arguments_are_named_in_one_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ValueError, match=r"`progress_bar` must be True or False, .*\n`save_interval` must be positive"
    ) as e:
        make_trainer(save_interval=-1, progress_bar="yes")
    assert 2 == len(str(e.value).splitlines())
    with pytest.raises(TypeError, match=r"`progress_bar` must be .*\n`seed` must be an integer"):
        make_trainer(progress_bar="yes", seed="a")
    with pytest.raises(TypeError, match=r"`optimizers` must be .*\n`loggers` must hold .*\n`profiler` must be"):
        make_trainer(optimizers=3, loggers="abc", profiler=True)
    wrong = {
        "train_dataloader": [],
        "max_duration": "0ep",
        "precision": "fp64",
        "device": "abacus",
        "device_train_microbatch_size": 0,
    }
    with pytest.raises(ValueError, match=r"train_dataloader") as e:
        make_trainer(**wrong)
    assert all(f"`{name}`" in str(e.value) for name in wrong)


def test_the_microbatch_size_of_the_constructor_is_kept_for_a_loader_of_fit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(train_dataloader=None, device_train_microbatch_size=2)
    trainer.fit(train_dataloader=make_trainer.loader())

    assert 2 == trainer.state.device_train_microbatch_size


def test_a_fraction_of_a_sample_needs_a_function_that_splits_batches(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ValueError, match=r"`device_train_microbatch_size` must be an integer .*, got 2\.5\. Pass `split_batch"
    ):
        make_trainer(device_train_microbatch_size=2.5)
