"""A snapshot of the model's structure restores the parameter groups of the optimizers as they were."""

from __future__ import annotations

import torch

from composer.core import State
from composer.core.saving.structure import ModelSnapshot


def test_groups_lose_the_parameters_and_names_that_they_got_later() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}], lr=0.1)
    state = State(model=model, max_duration="1ep", optimizers=optimizer)
    snapshot = ModelSnapshot(state)

    group = optimizer.param_groups[0]
    group["params"].append(model.bias)
    group["param_names"] = ["weight", "bias"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "param_names": ["other"]})
    snapshot.restore(state)

    assert optimizer.param_groups == [group]
    assert group["params"] == [model.weight]
    assert "param_names" not in group


def test_names_of_parameters_are_restored() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    state = State(model=model, max_duration="1ep", optimizers=optimizer)
    snapshot = ModelSnapshot(state)

    optimizer.param_groups[0]["param_names"] = ["other", "names"]
    snapshot.restore(state)

    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_attributes_that_were_added_later_are_gone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    state = State(model=model, max_duration="1ep")
    snapshot = ModelSnapshot(state)

    model[0].forward = lambda x: x
    model.scale = 2.0
    snapshot.restore(state)

    assert "forward" not in vars(model[0])
    assert not hasattr(model, "scale")
