"""`FusedLayerNorm` at its event, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer.algorithms.fused_layernorm import FusedLayerNorm, MixedLayerNorm
from composer.core import ADDS_NORMS, REPLACES_LAYERNORMS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import SimpleTransformerModel


def run(algorithms: Any, *events: str) -> nn.Module:
    model = SimpleTransformerModel()
    state = State(
        model=model,
        max_duration="1ep",
        optimizers=torch.optim.Adam(model.parameters()),
        algorithms=algorithms,
    )
    engine = Engine(state)
    for event in events:
        engine.run_event(event)
    return model


def test_layers_are_replaced_at_init() -> None:
    model: Any = run(FusedLayerNorm(), "init")

    assert [MixedLayerNorm] * 2 == [type(model.layer.norm1), type(model.layer.norm2)]
    assert "FusedLayerNorm()" == repr(FusedLayerNorm())


def test_it_is_required_on_load() -> None:
    assert FusedLayerNorm.required_on_load()


class AddsNorms(Algorithm):
    """A method that adds layers to the model."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={ADDS_NORMS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.head = nn.Sequential(nn.LayerNorm(16), state.model.head)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_added_by_other_methods_are_replaced_in_any_order_of_the_list(reverse: bool) -> None:
    algorithms = [FusedLayerNorm(), AddsNorms()]
    model: Any = run(algorithms[::-1] if reverse else algorithms, "init")

    assert MixedLayerNorm is type(model.head[0])


class ReplacesLayerNorms(Algorithm):
    """Another implementation of the same layers."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_LAYERNORMS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise AssertionError("it is refused")


def test_a_second_implementation_of_the_same_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="FusedLayerNorm"):
        run([FusedLayerNorm(), ReplacesLayerNorms()])
