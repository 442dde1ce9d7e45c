"""The first programs of a newcomer: a loop of one's own with the engine, in both of its forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer import Engine, State, Time
from composer import functional as cf
from composer.algorithms import MixUp
from composer.testing import SimpleConvModel, deep_compare


def batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(count)
    ]


def make() -> tuple[State, Engine, list[Any]]:
    model = SimpleConvModel()
    dataloader = batches()
    state = State(model=model, max_duration=Time(2, "epoch"), rank_zero_seed=0, dataloader=dataloader)
    state.optimizers = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    state.schedulers = torch.optim.lr_scheduler.StepLR(state.optimizers[0], 4)
    torch.manual_seed(5)
    return state, Engine(state=state, algorithms=[MixUp(alpha=0.5)]), dataloader


def rest_of_step(state: State, engine: Engine) -> None:
    model: Any = state.model
    engine.run_event("batch_start")
    engine.run_event("before_forward")
    state.outputs = model.forward(state.batch)
    engine.run_event("after_forward")
    engine.run_event("before_loss")
    state.loss = model.loss(state.outputs, state.batch)
    engine.run_event("after_loss")
    engine.run_event("before_backward")
    state.loss.backward()
    engine.run_event("after_backward")
    state.optimizers.step()
    state.schedulers.step()
    state.optimizers.zero_grad()
    engine.run_event("batch_end")


def with_batches() -> State:
    state, engine, dataloader = make()
    engine.run_event("init")
    engine.run_event("fit_start")
    for _ in range(2):
        engine.run_event("epoch_start")
        for state.batch in dataloader:
            engine.run_event("after_dataloader")
            rest_of_step(state, engine)
        engine.run_event("epoch_end")
    return state


def with_inputs_and_targets() -> State:
    state, engine, dataloader = make()
    engine.run_event("init")
    engine.run_event("fit_start")
    for _ in range(2):
        engine.run_event("epoch_start")
        for state.inputs, state.targets in dataloader:
            engine.run_event("after_dataloader")
            rest_of_step(state, engine)
        engine.run_event("epoch_end")
    return state


def test_both_forms_of_a_hand_written_loop_train_alike() -> None:
    first, second = with_batches(), with_inputs_and_targets()

    deep_compare(first.model.state_dict(), second.model.state_dict())
    assert first.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)
    untrained = SimpleConvModel().state_dict()
    assert not torch.equal(untrained["module.0.weight"], first.model.state_dict()["module.0.weight"])


def test_the_function_alone() -> None:
    x, y = batches(1)[0]
    mixed, partner, mixing = cf.mixup_batch(x, y, alpha=0.2)

    assert (x.shape, y.shape) == (mixed.shape, partner.shape)
    assert 0 <= mixing <= 0.5
