"""The class, in a loop of one's own."""

import pytest
import torch

from composer.algorithms.__SNAKE__ import __CLASS__, __SNAKE___batch
from composer.core import Engine, Event, State
from composer.loggers import Logger
from composer.testing import SimpleConvModel


def make_state(algorithm: __CLASS__) -> State:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    state = State(
        model=SimpleConvModel(),
        max_duration="1ep",
        rank_zero_seed=0,
        dataloader=[batch],
        algorithms=algorithm,
    )
    state.batch = batch
    return state


def test_the_inputs_get_the_noise_that_the_function_draws() -> None:
    state = make_state(__CLASS__(strength=0.5))
    input, target = state.batch
    torch.manual_seed(3)
    expected = __SNAKE___batch(input, strength=0.5)

    torch.manual_seed(3)
    Engine(state, Logger(state)).run_event(Event.BEFORE_FORWARD)

    assert torch.equal(state.batch[0], expected)
    assert torch.equal(state.batch[1], target)


def test_strength_zero_changes_nothing() -> None:
    state = make_state(__CLASS__(strength=0.0))
    input, _ = state.batch

    Engine(state, Logger(state)).run_event(Event.BEFORE_FORWARD)

    assert torch.equal(state.batch[0], input)


def test_a_negative_strength_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`strength` must not be negative, got -0.1"):
        __CLASS__(strength=-0.1)
