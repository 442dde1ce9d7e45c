"""`__CLASS__` at its events, with the engine."""

from typing import Any

import pytest
import torch

from composer.algorithms.__SNAKE__ import __CLASS__, __FUNCTION__
from composer.core import Engine, Event, State
from composer.testing import SimpleConvModel


def run(algorithm: __CLASS__, loss: torch.Tensor, outputs: Any) -> torch.Tensor:
    """Return the loss after the event."""
    state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    state.loss, state.outputs = loss, outputs
    Engine(state).run_event(Event.AFTER_LOSS)
    changed: torch.Tensor = state.loss
    return changed


def test_the_penalty_is_added_to_the_loss() -> None:
    loss, logits = torch.tensor(1.0), torch.randn(4, 2)

    assert torch.equal(run(__CLASS__(weight=0.5), loss, logits), __FUNCTION__(loss, logits, weight=0.5))


def test_outputs_that_are_not_one_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs the model's outputs and its loss to be one tensor each, got dict"):
        run(__CLASS__(), torch.tensor(1.0), {"logits": torch.zeros(4, 2)})


def test_a_negative_weight_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`weight` must not be negative, got -0.1"):
        __CLASS__(weight=-0.1)
