"""`QKNorm` with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.qk_norm import HeadNorm, QKNorm
from composer.core import ADDS_NORMS, REPLACES_ATTENTION, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleTransformerModel
from composer.utils.module_surgery import count_module_instances


def make(norm: str = "rms") -> QKNorm:
    return QKNorm(norm, query_name="qkv", key_name="qkv", head_dim=8)


class Recorder(LoggerDestination):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.seen.update(hyperparameters)


def test_the_model_and_its_optimizer_get_norms_at_the_start() -> None:
    model, recorder = SimpleTransformerModel(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, max_duration="1ep", algorithms=make(), optimizers=optimizer)
    Engine(state, Logger(state, [recorder])).run_event("init")

    assert 2 == count_module_instances(model, HeadNorm)
    assert {"qk_norm/num_layers": 1} == recorder.seen
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_it_is_required_on_load_and_applying_it_in_two_runs_is_applying_it_once() -> None:
    model = SimpleTransformerModel()
    for _ in range(2):
        state = State(model=model, max_duration="1ep", algorithms=make())
        Engine(state).run_event("init")

    assert 2 == count_module_instances(model, HeadNorm)
    assert QKNorm.required_on_load()


class Replaced(Algorithm):
    """A method that replaces projections of attention."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_ATTENTION})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.layer.qkv = torch.nn.Linear(16, 48)  # type: ignore[union-attr]


@pytest.mark.parametrize("reverse", [False, True])
def test_replaced_attention_is_normalized(reverse: bool) -> None:
    algorithms: list[Algorithm] = [make(), Replaced()]
    model = SimpleTransformerModel()
    state = State(model=model, max_duration="1ep", algorithms=algorithms[::-1] if reverse else algorithms)
    Engine(state).run_event("init")
    query = model.layer.qkv(torch.randn(5, 16))[:, :8]

    assert ADDS_NORMS in QKNorm().placement.provides
    torch.testing.assert_close(torch.ones(5), query.square().mean(-1), rtol=1e-3, atol=1e-3)


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`norm` must be 'rms' or 'layer', got 'group'"):
        QKNorm("group")
    with pytest.raises(ValueError, match=r"must be given together, got None and 'key'"):
        QKNorm(key_name="key")
    with pytest.raises(TypeError, match=r"`head_dim` must be an integer, got 0.5"):
        QKNorm(head_dim=0.5)  # type: ignore[arg-type]
