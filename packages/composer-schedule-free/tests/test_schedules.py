"""Schedules of the learning rate beside the average of the weights."""

from __future__ import annotations

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


def table(step: int) -> float:
    return [0.25, 0.5, 1.0, 1.0][step]  # not as long as the run


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


def test_a_learning_rate_that_falls_is_warned_of_once() -> None:
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
