"""`freeze_layers` on models of all kinds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from composer import functional as cf
from composer.algorithms.layer_freezing import freeze_layers
from composer.testing import SimpleConvModel


def make(num_layers: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()


def test_the_registered_function_is_this_one() -> None:
    assert cf.freeze_layers is freeze_layers


@pytest.mark.parametrize(
    ("duration", "start", "level", "expected"),
    [
        (0.0, 0.5, 1.0, (0, 0.0)),
        (0.5, 0.5, 1.0, (0, 0.0)),
        (0.75, 0.5, 1.0, (2, 0.5)),
        (0.74, 0.5, 1.0, (1, 0.48)),
        (1.0, 0.5, 1.0, (4, 1.0)),
        (1.0, 0.5, 0.5, (2, 0.5)),
        (0.5, 0.0, 1.0, (2, 0.5)),
        (1.0, 1.0, 1.0, (0, 0.0)),
        (1.2, 0.5, 1.0, (4, 1.0)),
        (1.0, 0.5, 0.0, (0, 0.0)),
    ],
)
def test_more_layers_are_frozen_the_further_training_has_come(
    duration: float, start: float, level: float, expected: tuple[int, float]
) -> None:
    model, optimizer = make(5)
    count, fraction = freeze_layers(model, optimizer, duration, start, level)

    assert expected == (count, pytest.approx(fraction))
    assert [i >= count for i in range(5) for _ in range(2)] == [p.requires_grad for p in model.parameters()]
    assert [id(p) for p in model.parameters() if p.requires_grad] == [id(p) for p in held_by(optimizer)]


@given(num_layers=st.integers(0, 6), duration=st.floats(0, 1), start=st.floats(0, 1), level=st.floats(0, 1))
def test_the_last_layer_always_trains(num_layers: int, duration: float, start: float, level: float) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)), nn.ReLU())
    count, fraction = freeze_layers(model, [], duration, start, level)

    assert 0 <= count <= max(num_layers - 1, 0)
    assert 0 <= fraction <= level
    assert [i >= count for i in range(num_layers) for _ in range(2)] == [p.requires_grad for p in model.parameters()]


def test_a_module_with_several_names_is_one_layer() -> None:
    """Otherwise the first layers of this model, listed twice, would push the last one among the frozen."""
    model = SimpleConvModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert (3, 1.0) == freeze_layers(model, optimizer, 1.0)
    loss: torch.Tensor = model((torch.zeros(2, 3, 8, 8), None)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert 2 == len(held_by(optimizer))


def test_a_module_with_parametrizations_is_one_layer() -> None:
    class Scaled(nn.Module):
        """A parametrization with a parameter and a part of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.part = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return self.part(self.scale) * weight

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    parametrizations.weight_norm(model[0])
    register_parametrization(model[1], "weight", Scaled())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    count, _ = freeze_layers(model, optimizer, 1.0, freeze_start=0.0, freeze_level=0.7)

    assert 2 == count  # int(0.7 * (4 - 1))
    assert not any(parameter.requires_grad for parameter in model[:2].parameters())
    assert all(parameter.requires_grad for parameter in model[2:].parameters())


def test_a_parameter_shared_with_a_layer_that_trains_stays() -> None:
    model, optimizer = make(3)
    model[2].weight = model[0].weight
    freeze_layers(model, optimizer, 1.0)

    assert model[0].weight.requires_grad
    assert not model[0].bias.requires_grad
    assert any(model[0].weight is parameter for parameter in held_by(optimizer))


def test_layers_without_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))

    assert (1, 1.0) == freeze_layers(model, [], 1.0)
    assert [False, False, True] == [p.requires_grad for p in model.parameters()]


def test_frozen_parameters_leave_all_groups_with_their_state() -> None:
    model, _ = make(3)
    first, rest = list(model[0].parameters()), [*model[1].parameters(), *model[2].parameters()]
    optimizers = [torch.optim.Adam([{"params": first, "lr": 0.5}, {"params": rest}]), torch.optim.SGD(first, lr=1.0)]
    for optimizer in optimizers:
        step(model, optimizer)
    freeze_layers(model, optimizers, 1.0)

    assert [0, 2] == [len(group["params"]) for group in optimizers[0].param_groups]
    assert set(map(id, model[2].parameters())) == set(map(id, optimizers[0].state))
    assert not held_by(optimizers[1])
    assert not optimizers[1].state
    assert 0.5 == optimizers[0].param_groups[0]["lr"]
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def test_parameter_names_of_the_groups_stay_in_step() -> None:
    model, _ = make(2)
    try:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    except TypeError:
        pytest.skip("this torch does not name parameters")
    freeze_layers(model, optimizer, 1.0)

    if "param_names" in optimizer.param_groups[0]:
        assert ["1.weight", "1.bias"] == optimizer.param_groups[0]["param_names"]


def test_frozen_parameters_do_not_change_and_keep_no_gradient() -> None:
    model, optimizer = make(3)
    step(model, optimizer)
    freeze_layers(model, optimizer, 0.75)
    frozen, free = model[0].weight.clone(), model[2].weight.clone()
    assert model[0].weight.grad is None
    step(model, optimizer)

    assert torch.equal(frozen, model[0].weight)
    assert not torch.equal(free, model[2].weight)
    assert model[0].weight.grad is None


def test_nothing_is_unfrozen() -> None:
    model, optimizer = make(3)
    freeze_layers(model, optimizer, 1.0)

    assert (0, 0.0) == freeze_layers(model, optimizer, 0.1)
    assert 2 == len(held_by(optimizer))


@pytest.mark.parametrize("name", ["freeze_start", "freeze_level"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_fraction_outside_its_range_is_refused(name: str, value: float) -> None:
    model, optimizer = make(1)
    with pytest.raises(ValueError, match=rf"`{name}` must be in \[0, 1\], got {value}"):
        freeze_layers(model, optimizer, 0.5, **{name: value})
