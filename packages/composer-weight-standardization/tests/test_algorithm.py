"""`WeightStandardization` on models, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from composer.algorithms.weight_standardization import WeightStandardization, WeightStandardizer
from composer.core import (
    FACTORIZES_WEIGHTS,
    REPLACES_BLOCKS,
    REPLACES_CONVS,
    WRAPS_CONVS,
    Algorithm,
    Engine,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger, LoggerDestination
from composer.testing import ConvModel, SimpleConvModel


class Records(LoggerDestination):
    """Logger that stores the hyperparameters of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(hyperparameters)


def start(model: nn.Module, *algorithms: Algorithm) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithms, callbacks=Records())
    Engine(state).run_event("init")
    return state


@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NoEffectWarning")
@pytest.mark.parametrize("ignored", [0, 1, 3])
def test_init_standardizes_and_logs_once(ignored: int) -> None:
    model, count = SimpleConvModel(), max(2 - ignored, 0)
    state = start(model, WeightStandardization(ignored))

    assert count == sum(isinstance(module, WeightStandardizer) for module in model.modules())
    expected = [{"WeightStandardization/num_weights_standardized": count}]
    assert expected == state.callbacks[0].calls  # type: ignore[attr-defined]


def test_the_optimizer_keeps_every_parameter() -> None:
    model = ConvModel()
    before = list(model.parameters())
    state = start(model, WeightStandardization())

    assert [id(p) for p in before] == [id(p) for p in state.optimizers[0].param_groups[0]["params"]]
    assert {id(p) for p in before} == {id(p) for p in model.parameters()}


def test_a_checkpoint_needs_it_before_loading() -> None:
    """Weights have other names, and the Trainer rebuilds the algorithm from its repr."""
    saved = ConvModel(seed=1)
    start(saved, WeightStandardization())
    model = ConvModel(seed=2)
    with pytest.raises(RuntimeError, match=r"parametrizations.weight.original"):
        model.load_state_dict(saved.state_dict())
    start(model, WeightStandardization())
    model.load_state_dict(saved.state_dict())

    assert WeightStandardization.required_on_load()
    assert "WeightStandardization(n_last_layers_ignore=2)" == repr(WeightStandardization(2))
    assert torch.equal(saved.conv1.weight, model.conv1.weight)


def test_applying_it_in_a_second_run_changes_nothing() -> None:
    model = ConvModel()
    names = [list(start(model, WeightStandardization()).model.state_dict()) for _ in range(2)]

    assert names[0] == names[1]


class BringsConvs(Algorithm):
    """A method that puts new convolutions into the model."""

    events = frozenset({Event.INIT})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.conv1 = nn.Conv2d(32, 8, 3)


@pytest.mark.parametrize("effect", [REPLACES_BLOCKS, WRAPS_CONVS, REPLACES_CONVS, FACTORIZES_WEIGHTS])
@pytest.mark.parametrize("reverse", [False, True])
def test_new_convolutions_are_standardized_whatever_the_order_of_the_list(effect: str, reverse: bool) -> None:
    model, algorithms = ConvModel(), [BringsConvs(effect), WeightStandardization()]
    start(model, *(reversed(algorithms) if reverse else algorithms))

    assert parametrize.is_parametrized(model.conv1, "weight")


def test_a_negative_number_of_layers_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`n_last_layers_ignore` must not be negative, got -1"):
        WeightStandardization(-1)
