from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.callbacks.lr_monitor import LRMonitor
from composer.core import Engine, State
from composer.loggers import InMemoryLogger


def test_every_group_is_logged_after_every_batch(run: Any, make_model: Any) -> None:
    model = make_model()
    groups = [{"params": model.fc1.parameters()}, {"params": model.fc2.parameters(), "lr": 0.5}]
    done = run(LRMonitor(), model=model, optimizers=torch.optim.SGD(groups, lr=0.1)).fit()

    assert done.keys("lr-") == {"lr-SGD/group0", "lr-SGD/group1"}
    assert done.values("lr-SGD/group0") == [0.1] * 8
    assert done.values("lr-SGD/group1") == [0.5] * 8


def test_a_scheduler_is_followed(run: Any, make_model: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    done = run(LRMonitor(), model=model, optimizers=optimizer, schedulers=schedule, step_schedulers_every_batch=True)
    done.fit(duration="3ba")

    assert done.values("lr-SGD/group0") == pytest.approx([1 / 2, 1 / 3, 1 / 4])


def test_a_rate_in_a_tensor_is_copied_and_two_optimizers_of_a_class_do_not_meet() -> None:
    rate = torch.tensor(0.5)
    first = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate)
    second = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    memory = InMemoryLogger()
    state = State(
        torch.nn.Linear(1, 1),
        max_duration="1ba",
        dataloader=[0],
        optimizers=[first, second],
        callbacks=[LRMonitor(), memory],
    )
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("batch_end")
    rate.fill_(0.125)

    assert float(memory.most_recent_values["lr-Adam/group0"]) == 0.5
    assert memory.most_recent_values["lr-Adam/group1"] == 0.25
    engine.close()


def test_nobody_listening_costs_nothing() -> None:
    state = State(torch.nn.Linear(1, 1), max_duration="1ba", dataloader=[0], callbacks=LRMonitor())
    state.optimizers = []
    Engine(state).run_event("batch_end")
