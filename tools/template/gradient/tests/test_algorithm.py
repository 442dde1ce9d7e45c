"""`__CLASS__` at its events, with the engine."""

import pytest
import torch

from composer.algorithms.__SNAKE__ import __CLASS__
from composer.core import Engine, Event, State


def test_gradients_change_after_all_microbatches_only() -> None:
    model = torch.nn.Linear(2, 2)
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=__CLASS__(strength=0.5))
    engine = Engine(state)
    model.weight.grad = torch.tensor([[1.0, 3.0], [2.0, 2.0]])

    engine.run_event(Event.AFTER_BACKWARD)
    assert model.weight.grad.tolist() == [[1.0, 3.0], [2.0, 2.0]]

    engine.run_event(Event.AFTER_TRAIN_BATCH)
    assert model.weight.grad.tolist() == [[0.0, 2.0], [1.0, 1.0]]


def test_a_negative_strength_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`strength` must be in \[0, 1\], got -0.1"):
        __CLASS__(strength=-0.1)
