"""`ScheduleFree` in a loop of one's own."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import schedulefree
import torch

from composer.algorithms.schedule_free import ScheduleFree, ScheduleFreeAdamW, ScheduleFreeSGD
from composer.algorithms.utils.batchnorm import recalibrate_batchnorm
from composer.core import (
    AVERAGES_WEIGHTS,
    SWAPS_WEIGHTS,
    Algorithm,
    Engine,
    Event,
    Placement,
    State,
)
from composer.testing import SimpleConvModel, deep_compare

MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "library": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.01),
    "two": lambda parameters: [
        torch.optim.SGD(parameters[:3], lr=0.1),
        schedulefree.RAdamScheduleFree(parameters[3:], lr=0.01),
    ],
}


@pytest.mark.parametrize("optimizer", MAKE)
def test_the_average_is_evaluated_and_remains_at_the_end(make_run: Any, optimizer: str) -> None:
    run = make_run(ScheduleFree(), make_optimizer=MAKE[optimizer])
    run.fit("4ba")
    for trained, evaluated in zip(run.trained[1:], run.evaluated[1:], strict=True):
        assert any(not torch.equal(trained[name], evaluated[name]) for name in trained)

    deep_compare(run.evaluated[-1], run.tensors())
    run.engine.run_event("fit_start")
    deep_compare(run.trained[-1], run.tensors())
    deep_compare(run.average(), {k: v for k, v in run.evaluated[-1].items() if k in run.average()}, atol=1e-14)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("optimizer", MAKE)
def test_evaluations_predictions_and_checkpoints_do_not_change_training(
    make_run: Any, make_saver: Any, optimizer: str, norm: str
) -> None:
    plain = make_run(ScheduleFree(), make_optimizer=MAKE[optimizer], evaluates=False, norm=norm).fit()
    savers = [make_saver(event) for event in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT)]
    run = make_run(ScheduleFree(), make_optimizer=MAKE[optimizer], callbacks=savers, norm=norm).fit("4ba")
    deep_compare(run.tensors(), run.evaluate("predict"))
    run.evaluated.pop()
    run.fit("2ep")

    deep_compare(plain.trained, run.trained)
    deep_compare(plain.tensors(), run.tensors())
    for saved, evaluated in zip(savers[0].saved, run.evaluated, strict=True):
        deep_compare(dict(saved["model"]), evaluated)


def test_the_random_state_is_not_changed(make_run: Any) -> None:
    run = make_run(ScheduleFree(), norm="batch", evaluates=False)
    run.fit("3ba")
    run.engine.run_event("fit_start")
    before = torch.get_rng_state()
    run.evaluate()

    assert torch.equal(before, torch.get_rng_state())


def test_statistics_of_batch_norm_are_measured_for_the_average(make_run: Any) -> None:
    run = make_run(ScheduleFree(recalibration_batches=2), norm="batch").fit()
    expected = copy.deepcopy(run.model)
    recalibrate_batchnorm(expected, list(run.loader), 2)

    deep_compare(run.tensors(), {k: v.detach() for k, v in expected.state_dict().items()}, atol=1e-14)
    run.engine.run_event("fit_start")
    deep_compare(run.trained[-1], run.tensors())


def test_without_recalibration_the_statistics_are_those_of_training(make_run: Any) -> None:
    run = make_run(ScheduleFree(recalibration_batches=0), norm="batch").fit()
    names = [name for name in run.tensors() if "running" in name]

    assert names
    for name in names:
        assert torch.equal(run.trained[-1][name], run.tensors()[name])


def test_data_that_can_be_iterated_once_needs_other_data(make_run: Any) -> None:
    once = make_run(ScheduleFree(), norm="batch")
    once.state.train_dataloader = iter(())
    with pytest.raises(ValueError, match="`ScheduleFree` must recalibrate"):
        once.engine.run_event("fit_start")
    data = make_run(norm="batch").loader
    run = make_run(ScheduleFree(recalibration_data=data), norm="batch")
    run.state.train_dataloader = iter(())
    run.fit()


@pytest.mark.parametrize("event", [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_run_continues_from_each_checkpoint_as_if_it_had_not_stopped(
    make_run: Any, make_saver: Any, event: Event, norm: str
) -> None:
    whole = make_run(ScheduleFree(warmup="4ba"), callbacks=(saver := make_saver(event)), norm=norm).fit()
    for saved in saver.saved:
        assert saved["optimizers"]["ScheduleFreeSGD"]["param_groups"][0]["train_mode"] is False
        resumed = make_run(ScheduleFree(warmup="4ba"), norm=norm)
        resumed.state.load_state_dict(copy.deepcopy(saved))
        resumed.engine.run_event("after_load")
        deep_compare(dict(saved["model"]), resumed.tensors())
        done = int(resumed.state.timestamp.batch)
        resumed.fit()

        deep_compare(whole.trained[done:], resumed.trained)
        deep_compare(whole.tensors(), resumed.tensors())
        deep_compare(whole.state.state_dict()["optimizers"], resumed.state.state_dict()["optimizers"])


def test_two_fits_equal_one(make_run: Any) -> None:
    whole = make_run(ScheduleFree(), norm="batch").fit("5ba")
    halves = make_run(ScheduleFree(), norm="batch").fit("2ba").fit("5ba")

    deep_compare(whole.trained, halves.trained)
    deep_compare(whole.tensors(), halves.tensors())


def test_weights_that_were_changed_between_two_fits_are_used(make_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(ScheduleFree(), norm="batch").fit("3ba")
    name = "module.0.weight"
    with torch.no_grad():
        run.model.get_parameter(name).fill_(0.5)
    with caplog.at_level(logging.WARNING):
        run.engine.run_event("fit_start")
    weight = run.model.get_parameter(name)

    assert "1 parameters (module.0.weight) were changed" in caplog.text
    assert torch.equal(torch.full_like(weight, 0.5), weight)
    assert torch.equal(weight, run.state.optimizers[0].state[weight]["z"])
    others = [key for key, _ in run.model.named_parameters() if key != name]
    for key in others:
        assert torch.equal(run.trained[-1][key], run.tensors()[key])


@pytest.mark.parametrize("saves", [False, True])
def test_frozen_weights_keep_the_average(make_run: Any, make_saver: Any, saves: bool) -> None:
    run = make_run(ScheduleFree(), callbacks=make_saver(Event.BATCH_CHECKPOINT) if saves else ())
    run.engine.run_event("fit_start")
    for batch in run.loader:
        run.step(batch)
    weight = run.model.get_parameter("module.0.weight")
    assert saves != torch.equal(weight, run.trained[-1]["module.0.weight"])
    (optimizer,) = run.state.optimizers
    optimizer.state.pop(weight)
    optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p is not weight]
    weight.requires_grad_(False)
    run.engine.run_event("epoch_end")
    names = ("module.0.weight", "conv1.weight")  # of one parameter
    found, expected = run.tensors(), run.trained[-1] | {name: run.evaluated[-1][name] for name in names}

    deep_compare(expected, found)
    deep_compare(run.evaluated[-1], run.evaluate())
    deep_compare(expected, run.tensors())


# ---- optimizers ----


def test_the_optimizers_are_replaced_and_other_groups_kept(make_run: Any) -> None:
    run = make_run(ScheduleFree(warmup="2ep", momentum=0.8), make_optimizer=MAKE["two"])
    first, second = run.state.optimizers

    assert type(first) is ScheduleFreeSGD
    assert isinstance(second, schedulefree.RAdamScheduleFree)
    assert (first.param_groups[0]["lr"], first.param_groups[0]["momentum"]) == (0.1, 0.8)
    with pytest.warns(UserWarning, match="takes 6 batches, but the run ends before, at '1ba'"):
        run.fit("1ba")
    assert first.param_groups[0]["warmup_steps"] == 6
    assert first.param_groups[0]["scheduled_lr"] == pytest.approx(0.1 / 6)


def test_adam_of_every_kind_becomes_adamw(make_run: Any) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        run = make_run(ScheduleFree(), make_optimizer=lambda parameters, kind=kind: kind(parameters, lr=0.01))
        assert type(run.state.optimizers[0]) is ScheduleFreeAdamW


def test_a_schedule_of_the_replaced_optimizer_goes_on_after_loading(make_run: Any, make_saver: Any) -> None:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        made.append(torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=6))
        return optimizer

    made: list[Any] = []
    whole = make_run(ScheduleFree(), make_optimizer=make, callbacks=(saver := make_saver(Event.BATCH_CHECKPOINT)))
    whole.state.schedulers = made[0]
    whole.fit()
    resumed = make_run(ScheduleFree(), make_optimizer=make)
    resumed.state.schedulers = made[1]
    resumed.state.load_state_dict(copy.deepcopy(saver.saved[2]))
    resumed.engine.run_event("after_load")
    resumed.fit()

    assert whole.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)
    deep_compare(whole.trained[3:], resumed.trained)


def test_a_rate_of_ones_own_does_not_fit_a_schedule_of_the_replaced_optimizer(make_run: Any) -> None:
    sgd: list[Any] = []
    run = make_run(ScheduleFree(lr=1.0), make_optimizer=lambda p: sgd.append(torch.optim.SGD(p, lr=0.1)) or sgd[0])
    run.state.schedulers = torch.optim.lr_scheduler.ConstantLR(sgd[0], factor=1.0)
    assert run.state.optimizers[0].param_groups[0]["lr"] == 1.0
    sgd[0].param_groups[0]["initial_lr"] = 0.1
    run.state.schedulers[0].base_lrs = [0.1]
    with pytest.raises(ValueError, match=r"`lr` must be None .* got 1\.0: ConstantLR sets the learning rate to 0\.1"):
        run.engine.run_event("fit_start")


@pytest.mark.parametrize(("name", "value"), [("warmup", "5ba"), ("lr", 0.5), ("momentum", 0.8), ("r", 1.0)])
def test_settings_of_optimizers_that_are_schedule_free_already_are_refused(
    make_run: Any, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be set where the optimizers are made, .* got {value!r}"):
        make_run(ScheduleFree(**{name: value}), make_optimizer=MAKE["library"])


class Wrapper(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step()


def test_what_is_in_a_wrapper_must_be_schedule_free_already(make_run: Any) -> None:
    with pytest.raises(ValueError, match="must replace an optimizer that is not wrapped, got Wrapper around SGD"):
        make_run(ScheduleFree(), make_optimizer=lambda p: Wrapper(torch.optim.SGD(p, lr=0.1)))
    run = make_run(ScheduleFree(), make_optimizer=lambda p: Wrapper(ScheduleFreeSGD(p, lr=0.1)))
    assert isinstance(run.state.optimizers[0], Wrapper)


def test_other_optimizers_are_refused(make_run: Any) -> None:
    with pytest.raises(TypeError, match="a `step` without a closure and no modes of its own, got LBFGS"):
        make_run(ScheduleFree(), make_optimizer=torch.optim.LBFGS)


def test_a_warmup_in_epochs_needs_their_length(make_run: Any) -> None:
    run = make_run(ScheduleFree(warmup="1ep"))
    run.state.set_dataloader(iter(()), "train")
    with pytest.raises(ValueError, match="`warmup` must be in 'ba' if the length of the training data is unknown"):
        run.engine.run_event("fit_start")


@pytest.mark.parametrize(("warmup", "steps"), [("9ba", 9), ("3ep", 9)])
def test_a_warmup_that_is_longer_than_the_run_raises_a_warning(warmup: str, steps: int, make_run: Any) -> None:
    run = make_run(ScheduleFree(warmup=warmup))
    run.state.max_duration = f"{steps - 1}ba"
    with pytest.warns(UserWarning, match=f"takes {steps} batches, but the run ends before, at '{steps - 1}ba'"):
        run.engine.run_event("fit_start")


# ---- arguments and placement ----


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"warmup": 5}, TypeError, "`warmup` must be a time string"),
        ({"warmup": "5"}, ValueError, r"`warmup` must be a number of batches \('ba'\) or epochs \('ep'\), got '5'"),
        ({"warmup": "0.1dur"}, ValueError, r"`warmup` must be in 'ba' or 'ep', got '0\.1dur'"),
        ({"warmup": "-1ba"}, ValueError, "`warmup` must be at least 0"),
        ({"lr": -1.0}, ValueError, "`lr` must not be negative"),
        ({"weight_decay": float("inf")}, ValueError, "`weight_decay` must be"),
        ({"momentum": 1.0}, ValueError, "`momentum` must be between 0 and 1, got 1.0"),
        ({"r": -1.0}, ValueError, "`r` must not be negative"),
        ({"recalibration_batches": -1}, ValueError, "`recalibration_batches` must not be negative"),
        ({"recalibration_batches": 1.5}, TypeError, "`recalibration_batches` must be an integer"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ScheduleFree(**arguments)


class Other(Algorithm):
    events = frozenset({Event.BATCH_END})

    def __init__(self, *effects: str) -> None:
        self.placement = Placement(provides=effects)

    def apply(self, event: Event, state: State, logger: Any) -> None:
        pass


@pytest.mark.parametrize("effect", [AVERAGES_WEIGHTS, SWAPS_WEIGHTS])
def test_methods_that_do_the_same_are_refused(effect: str) -> None:
    state = State(model=SimpleConvModel(), max_duration="1ep", algorithms=[ScheduleFree(), Other(effect)])
    with pytest.raises(ValueError, match="ScheduleFree"):
        Engine(state)


def test_a_copy_of_the_algorithm_holds_no_run(make_run: Any) -> None:
    algorithm = ScheduleFree()
    make_run(algorithm).fit("3ba")
    twin = copy.deepcopy(algorithm)

    assert ([], {}) == (twin._replaced, twin._trained)


def test_it_may_be_used_in_a_second_run(make_run: Any) -> None:
    algorithm = ScheduleFree()
    first = make_run(algorithm).fit("3ba")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = make_run(algorithm).fit("3ba")

    deep_compare(first.trained, second.trained)
