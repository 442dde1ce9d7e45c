"""`apply_ghost_batchnorm` and `GhostBatchNorm` on models, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.ghost_batchnorm import (
    GhostBatchNorm,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    apply_ghost_batchnorm,
    ghost_batchnorm,
)
from composer.algorithms.warnings import NoEffectWarning
from composer.core import ADDS_NORMS, REPLACES_BLOCKS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import ConvModel, SimpleConvModel


class Records(LoggerDestination):
    """Records the logged hyperparameters, call by call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(hyperparameters)


def start(model: nn.Module, *algorithms: Algorithm) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithms, callbacks=Records())
    Engine(state).run_event("init")
    return state


def test_the_function_is_registered() -> None:
    assert apply_ghost_batchnorm is cf.apply_ghost_batchnorm


def test_the_layers_are_next_to_the_function_too() -> None:
    assert ghost_batchnorm.GhostBatchNorm1d is GhostBatchNorm1d
    assert ghost_batchnorm.GhostBatchNorm2d is GhostBatchNorm2d
    assert ghost_batchnorm.GhostBatchNorm3d is GhostBatchNorm3d


def test_normalizations_of_every_number_of_dimensions_are_wrapped() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.GroupNorm(1, 2))
    model.append(nn.SyncBatchNorm(2))
    apply_ghost_batchnorm(model, 4)

    expected = [GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d, nn.GroupNorm, nn.SyncBatchNorm]
    assert expected == [type(layer) for layer in model]
    assert [4, 4, 4] == [layer.ghost_batch_size for layer in model[:3]]


def test_init_wraps_and_logs_once() -> None:
    model = ConvModel()
    bn = model.bn
    state = start(model, GhostBatchNorm(ghost_batch_size=4))

    assert isinstance(model.bn, GhostBatchNorm2d)
    assert model.bn is model.module[3]
    assert model.bn.batchnorm is bn
    assert [{"GhostBatchNorm/num_new_modules": 1}] == state.callbacks[0].calls  # type: ignore[attr-defined]


def test_it_acts_without_a_logger() -> None:
    model = ConvModel()
    GhostBatchNorm().apply(Event.INIT, State(model=model), None)

    assert isinstance(model.bn, GhostBatchNorm2d)


def test_the_optimizer_keeps_every_parameter_and_its_state() -> None:
    model = ConvModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model((torch.randn(4, 32, 8, 8), None)).sum().backward()
    optimizer.step()
    before, momentum = list(model.parameters()), optimizer.state[model.bn.weight]
    apply_ghost_batchnorm(model, 2, optimizer)

    trained = optimizer.param_groups[0]["params"]
    assert [id(p) for p in before] == [id(p) for p in trained]
    assert optimizer.state[model.bn.batchnorm.weight] is momentum


def test_state_keys_are_those_of_the_wrapped_layer() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    expected = [f"0.batchnorm.{name}" for name in model[0].state_dict()]
    apply_ghost_batchnorm(model)

    assert expected == list(model.state_dict())


def test_applying_it_twice_is_applying_it_once() -> None:
    model = ConvModel()
    apply_ghost_batchnorm(model, 4)
    once = [(name, type(module)) for name, module in model.named_modules()]
    apply_ghost_batchnorm(model, 8)

    assert once == [(name, type(module)) for name, module in model.named_modules()]


def test_training_and_evaluation_mode_are_kept() -> None:
    model = ConvModel().eval()
    apply_ghost_batchnorm(model)

    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.BatchNorm2d(2), SimpleConvModel(norm="group")])
def test_a_model_with_nothing_to_wrap_gets_a_warning(model: nn.Module) -> None:
    with pytest.warns(NoEffectWarning, match=r"`apply_ghost_batchnorm` changed nothing"):
        apply_ghost_batchnorm(model)


def test_sizes_are_checked_before_anything_changes() -> None:
    with pytest.raises(ValueError, match=r"`ghost_batch_size` must be at least 1, got 0"):
        GhostBatchNorm(ghost_batch_size=0)
    with pytest.raises(ValueError, match=r"`ghost_batch_size` must be at least 1, got -2"):
        apply_ghost_batchnorm(nn.Linear(2, 2), ghost_batch_size=-2)


def test_it_is_required_on_load() -> None:
    assert GhostBatchNorm.required_on_load()


class BringsNorms(Algorithm):
    """A method that puts new normalizations into the model."""

    events = frozenset({Event.INIT})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.bn = nn.BatchNorm2d(64)


@pytest.mark.parametrize("effect", [ADDS_NORMS, REPLACES_BLOCKS])
@pytest.mark.parametrize("reverse", [False, True])
def test_new_normalizations_are_wrapped_in_any_order_of_the_list(effect: str, reverse: bool) -> None:
    model, algorithms = ConvModel(), [BringsNorms(effect), GhostBatchNorm()]
    start(model, *(reversed(algorithms) if reverse else algorithms))

    assert isinstance(model.bn, GhostBatchNorm2d)


class Conditional(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input) + shift


def test_a_normalization_that_takes_a_condition_stays() -> None:
    model = nn.ModuleList([Conditional(4), nn.BatchNorm2d(4)])
    with pytest.warns(UserWarning, match=r"`0` \(Conditional\): its `forward` takes more than the input"):
        apply_ghost_batchnorm(model)

    assert ["Conditional", "GhostBatchNorm2d"] == [type(layer).__name__ for layer in model]
