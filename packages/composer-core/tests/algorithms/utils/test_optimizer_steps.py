"""Groups without weight decay, and copies of weights before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer.algorithms.utils.optimizer_steps import copy_before_step, take_over_decay


def named(model: nn.Module, *names: str) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name in names}


def test_only_groups_that_must_change_are_divided() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1},
        {"params": [model[1].weight], "weight_decay": 0.2},
        {"params": [model[1].bias], "weight_decay": 0.3},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    former = take_over_decay("Foo", [optimizer], named(model, "0.weight", "1.weight", "x"))

    assert {"0.weight": 0.1, "1.weight": 0.2} == former
    assert [(0.1, 1), (0.0, 1), (0.3, 1), (0.0, 1)] == [
        (group["weight_decay"], len(group["params"])) for group in optimizer.param_groups
    ]
    assert (0.5, 0.9) == (optimizer.param_groups[-1]["lr"], optimizer.param_groups[-1]["momentum"])


@pytest.mark.parametrize("lr", [None, 0.5])
def test_groups_without_decay_change_only_for_a_learning_rate(lr: float | None) -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.named_parameters(), lr=0.1)
    take_over_decay("Foo", [optimizer], named(model, "weight"), lr)

    expected = [(0.1, ["weight", "bias"])] if lr is None else [(0.1, ["bias"]), (0.5, ["weight"])]
    assert expected == [(group["lr"], group["param_names"]) for group in optimizer.param_groups]


def test_a_schedule_begins_at_the_new_learning_rate() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "initial_lr": 0.1}], lr=0.1)  # as `DecoupledSGDW`
    take_over_decay("Foo", [optimizer], named(model, "weight"), 0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

    assert [0.05, 0.25] == [group["lr"] for group in optimizer.param_groups]


def test_copies_have_the_rates_of_the_step_and_leave_out_what_no_optimizer_has() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([model.weight], lr=rate, foreach=False)
    before = copy_before_step([optimizer], named(model, "weight", "bias"))
    expected = model.weight.detach().clone()
    rate.fill_(0.0)
    with torch.no_grad():
        model.weight.zero_()

    assert ["weight"] == before.names
    assert torch.equal(expected, before.previous[0])
    assert pytest.approx(0.1) == float(before.rates[0])
