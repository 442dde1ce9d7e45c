"""Tests of the driver where a loop does not show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.core import Algorithm, Engine, Event, State
from composer.loop import Driver
from composer.testing import SimpleModel


class ReplacesLoss(Algorithm):
    """Replaces the model's loss before the forward pass, as methods do that compute the loss in it."""

    events = frozenset({Event.BEFORE_FORWARD})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        state.model.loss = lambda outputs, batch: outputs.sum() * 0 + 7  # type: ignore[assignment]


def test_the_loss_is_looked_up_after_the_forward_pass() -> None:
    model = SimpleModel()
    state = State(model=model, rank_zero_seed=0, max_duration="1ep", dataloader=[1], algorithms=ReplacesLoss())
    driver = Driver(Engine(state))

    loss = driver.compute_loss((torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.long)), model)

    assert loss == 7


class ReadsTargetsLate(Algorithm):
    events = frozenset({Event.BEFORE_LOSS})
    target_key = 1

    def apply(self, event: Event, state: State, logger: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("batch", "expected"),
    [({"pixel_values": 1, "labels": 2}, {"batch": "inputs: 'pixel_values', targets: 'labels'"}), ((1, 2), {})],
)
def test_the_plan_names_inputs_and_targets_that_were_found(batch: Any, expected: dict[str, str]) -> None:
    driver = Driver(Engine(State(model=SimpleModel(), max_duration="1ep", dataloader=[1])))
    driver.state.batch = batch
    driver.find_batch_keys()

    assert expected == driver.engine.explain().notes


def test_targets_that_are_read_late_are_looked_for_in_the_first_batch() -> None:
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[1], algorithms=ReadsTargetsLate())
    driver = Driver(Engine(state))
    state.batch = {"x": 1, "answer": 2}
    with pytest.raises(KeyError, match=r"keys 'x', 'answer', and has no 1\. Pass the keys to use"):
        driver.find_batch_keys()
