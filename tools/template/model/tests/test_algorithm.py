"""`__CLASS__` at its events, with the engine."""

import pytest
import torch
from torch import nn

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.core import Engine, Event, State


def test_the_layers_are_replaced_at_init_and_the_optimizer_trains_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=__CLASS__(slope=0.1))

    Engine(state).run_event(Event.INIT)

    layer = model[1]
    assert isinstance(layer, nn.PReLU)
    assert any(parameter is layer.weight for parameter in optimizer.param_groups[0]["params"])


def test_a_saved_model_cannot_be_loaded_without_it() -> None:
    assert __CLASS__.required_on_load()


def test_a_negative_slope_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`slope` must be in \[0, 1\], got -0.1"):
        __CLASS__(slope=-0.1)
