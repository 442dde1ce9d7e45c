"""Schedulers that lower the learning rate are found before the run starts; others are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from composer.algorithms.schedule_free import ScheduleFree
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import Engine, State

Make = Callable[[torch.optim.Optimizer], Any]


def sequence(optimizer: torch.optim.Optimizer, *parts: Make, milestone: int = 3) -> Any:
    return schedulers.SequentialLR(optimizer, [part(optimizer) for part in parts], milestones=[milestone])


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ConstantLR(optimizer, factor=1.0)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.CosineAnnealingLR(optimizer, T_max=20)


def table(step: int) -> float:
    return [0.25, 0.5, 1.0, 1.0][step]  # not as long as the run


FALLING: dict[str, Make] = {
    "cosine": cosine,
    "long cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=10_000),
    "step": lambda o: schedulers.StepLR(o, 5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [18]),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.999),
    "linear": lambda o: schedulers.LinearLR(o, 1.0, 0.5, total_iters=20),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=30, cycle_momentum=False),
    "function": lambda o: schedulers.LambdaLR(o, lambda step: 1 / math.sqrt(step + 1)),
    "warmup and cosine": lambda o: sequence(o, warmup, cosine),
    "product": lambda o: schedulers.ChainedScheduler([warmup(o), schedulers.ExponentialLR(o, 0.9)]),
}
FINE: dict[str, Make] = {
    "constant": constant,
    "warmup": warmup,
    "warmup, then constant": lambda o: sequence(o, warmup, constant),
    "two warmups": lambda o: schedulers.ChainedScheduler([warmup(o), warmup(o)]),
    "after the end": lambda o: schedulers.StepLR(o, 30),
    "rising": lambda o: schedulers.LambdaLR(o, lambda step: 1 + 0.1 * step),
    "table": lambda o: schedulers.LambdaLR(o, table),
}


def start(make: Make, replaced: bool) -> tuple[Engine, State]:
    """A run of 20 batches; the scheduler is made before or after the optimizer is replaced."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.Module()
    model.register_parameter("weight", parameter)
    sgd = torch.optim.SGD([parameter], lr=0.5)
    early = make(sgd) if replaced else None
    state = State(
        model=model,
        max_duration="20ba",
        dataloader=[torch.zeros(2)] * 5,
        optimizers=sgd,
        algorithms=ScheduleFree(),
        run_name="run",
    )
    engine = Engine(state)
    engine.run_event("init")
    state.schedulers = early or make(state.optimizers[0])
    return engine, state


@pytest.mark.parametrize("event", ["after_load", "fit_start"])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", FALLING)
def test_a_falling_learning_rate_is_refused(name: str, replaced: bool, event: str) -> None:
    engine, state = start(FALLING[name], replaced)
    before, now = state.schedulers[0].state_dict(), state.timestamp
    with pytest.raises(ValueError, match=r"`schedulers` must not lower the learning rate .* lowers it from \d"):
        engine.run_event(event)

    assert now == state.timestamp
    assert str(before) == str(state.schedulers[0].state_dict())


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # older `SequentialLR` passes it
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", FINE)
def test_another_schedule_is_followed(name: str, replaced: bool) -> None:
    engine, state = start(FINE[name], replaced)
    engine.run_event("fit_start")
    (group,) = state.optimizers[0].param_groups
    rates = []
    for _ in range(3):
        state.model.weight.grad = torch.ones(2)
        state.optimizers.step()
        state.schedulers[0].step()
        rates.append(group["lr"])

    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    scheduler = FINE[name](plain)
    expected = []
    for _ in range(3):
        plain.step()
        scheduler.step()
        expected.append(plain.param_groups[0]["lr"])
    assert expected == rates


def test_a_scheduler_of_other_weights_may_fall() -> None:
    engine, state = start(constant, replaced=False)
    other = torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    state.optimizers = [*state.optimizers, other]
    state.schedulers = [*state.schedulers, cosine(other)]
    engine.run_event("fit_start")


class OfTime(schedulers.LambdaLR):
    """Follows a function of the state, as the schedules of `composer.optim` do."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: State, function: Callable[[State], float]) -> None:
        super().__init__(optimizer, lambda _: function(state))


UNITS = {
    "batches": (lambda state: 20 - state.timestamp.batch.value, "20ba"),
    "epochs": (lambda state: 4 - state.timestamp.epoch.value, "4ep"),
    "duration": (lambda state: 1 - float(state.get_elapsed_duration()), "4ep"),
    "samples": (lambda state: 100 - state.timestamp.sample.value, "4ep"),
    "run of samples": (lambda state: 1 - float(state.get_elapsed_duration()), "80sp"),
    "run of seconds": (lambda state: 1 - float(state.get_elapsed_duration()), "80sec"),
}


@pytest.mark.parametrize("unit", UNITS)
def test_functions_of_the_time_are_evaluated_at_the_times_of_the_run(unit: str) -> None:
    function, end = UNITS[unit]
    engine, state = start(constant, replaced=False)
    state.max_duration = end
    state.set_dataloader(torch.utils.data.DataLoader(torch.zeros(20, 2), batch_size=4), "train")
    state.schedulers = OfTime(state.optimizers[0], state, function)
    with pytest.raises(ValueError, match="must not lower the learning rate"):
        engine.run_event("fit_start")


def test_what_could_not_be_foreseen_is_warned_of_once() -> None:
    engine, state = start(constant, replaced=False)
    engine.run_event("fit_start")
    (group,) = state.optimizers[0].param_groups
    for batch, rate in enumerate([0.1, 0.2, 0.2, 0.1, 0.05]):
        group["lr"] = rate
        state.model.weight.grad = torch.ones(2)
        state.optimizers.step()
        if batch == 3:
            with pytest.warns(NotIntendedUseWarning, match=r"has fallen from 0\.2 to 0\.1\. The average"):
                engine.run_event("batch_end")
        else:
            engine.run_event("batch_end")
