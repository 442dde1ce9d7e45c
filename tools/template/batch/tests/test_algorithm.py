"""`__CLASS__` at its events, with the engine."""

import pytest
import torch

from composer.algorithms.__SNAKE__ import __CLASS__, __FUNCTION__
from composer.core import Engine, Event, State
from composer.testing import SimpleConvModel


def run(algorithm: __CLASS__, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch that the model sees."""
    state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=[batch], algorithms=algorithm)
    state.batch = batch
    Engine(state).run_event(Event.BEFORE_FORWARD)
    input, target = state.batch
    return input, target


def test_the_batch_is_the_one_that_the_function_returns() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    torch.manual_seed(3)
    expected = __FUNCTION__(*batch, probability=0.5)

    torch.manual_seed(3)
    input, target = run(__CLASS__(probability=0.5), batch)

    assert torch.equal(input, expected[0])
    assert torch.equal(target, expected[1])


def test_probability_zero_changes_nothing() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))

    input, target = run(__CLASS__(probability=0.0), batch)

    assert torch.equal(input, batch[0])
    assert torch.equal(target, batch[1])


def test_a_negative_probability_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`probability` must be in \[0, 1\], got -0.1"):
        __CLASS__(probability=-0.1)
