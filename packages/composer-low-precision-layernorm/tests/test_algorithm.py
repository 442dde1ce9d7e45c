"""`LowPrecisionLayerNorm` at its event, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer.algorithms.low_precision_layernorm import LowPrecisionLayerNorm, LPLayerNorm
from composer.algorithms.warnings import NoEffectWarning
from composer.core import ADDS_NORMS, REPLACES_LAYERNORMS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import SimpleTransformerModel


def run(algorithms: Any, *events: str, precision: str = "amp_bf16") -> nn.Module:
    model = SimpleTransformerModel()
    state = State(
        model=model,
        max_duration="1ep",
        precision=precision,
        optimizers=torch.optim.Adam(model.parameters()),
        algorithms=algorithms,
    )
    engine = Engine(state)
    for event in events:
        engine.run_event(event)
    return model


@pytest.mark.parametrize("apply_at", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_layers_are_replaced_at_the_requested_event(apply_at: Event) -> None:
    events = ["init", "before_load", "after_load"]
    before: Any = run(LowPrecisionLayerNorm(apply_at), *events[: events.index(apply_at.value)])
    after: Any = run(LowPrecisionLayerNorm(apply_at), *events)

    assert [nn.LayerNorm] * 2 == [type(before.layer.norm1), type(before.layer.norm2)]
    assert [LPLayerNorm] * 2 == [type(after.layer.norm1), type(after.layer.norm2)]
    assert f"LowPrecisionLayerNorm(apply_at=Event.{apply_at.name})" == repr(LowPrecisionLayerNorm(apply_at))


def test_a_run_in_full_precision_raises_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match=r"only applies to AMP_FP16 and AMP_BF16 precisions, got 'fp32'"):
        run(LowPrecisionLayerNorm(), "init", precision="fp32")


@pytest.mark.parametrize("apply_at", [Event.FIT_START, Event.BATCH_START, None])
def test_other_events_are_refused(apply_at: Any) -> None:
    with pytest.raises(ValueError, match=r"`apply_at` must be Event.INIT, Event.BEFORE_LOAD or Event.AFTER_LOAD, got"):
        LowPrecisionLayerNorm(apply_at)


def test_a_checkpoint_requires_it() -> None:
    assert LowPrecisionLayerNorm.required_on_load()


class AddsNorms(Algorithm):
    """A method that adds new layers."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={ADDS_NORMS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.head = nn.Sequential(nn.LayerNorm(16), state.model.head)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_added_by_other_methods_are_replaced_whatever_the_order_of_the_list(reverse: bool) -> None:
    algorithms = [LowPrecisionLayerNorm(), AddsNorms()]
    model: Any = run(algorithms[::-1] if reverse else algorithms, "init")

    assert LPLayerNorm is type(model.head[0])


class ReplacesLayerNorms(Algorithm):
    """Another implementation of the same layers."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_LAYERNORMS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise AssertionError("it is refused")


def test_a_second_implementation_of_the_same_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="LowPrecisionLayerNorm"):
        run([LowPrecisionLayerNorm(), ReplacesLayerNorms()])
