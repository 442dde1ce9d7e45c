from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from composer.optim import scale_pytorch_scheduler

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(scheduler: LRScheduler, steps: int = 60) -> list[Any]:
    seen = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        seen.extend(scheduler.get_last_lr())
    return seen


@pytest.mark.parametrize(
    ("make", "ssr", "scaled"),
    [
        (lambda o: lr_scheduler.StepLR(o, 8), 0.5, lambda o: lr_scheduler.StepLR(o, 4)),
        (lambda o: lr_scheduler.StepLR(o, 5), 1.5, lambda o: lr_scheduler.StepLR(o, 7)),
        (lambda o: lr_scheduler.MultiStepLR(o, [8, 20]), 0.5, lambda o: lr_scheduler.MultiStepLR(o, [4, 10])),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 40), 0.5, lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
        (
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, T_mult=2),
            0.5,
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, T_mult=2),
        ),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.9), 0.5, lambda o: lr_scheduler.ExponentialLR(o, 0.81)),
    ],
)
def test_a_scaled_scheduler_behaves_like_one_made_with_the_scaled_lengths(make: Make, ssr: float, scaled: Make) -> None:
    scheduler = make(optimizer())
    scale_pytorch_scheduler(scheduler, ssr)

    assert rates(scaled(optimizer())) == pytest.approx(rates(scheduler))


def test_milestones_that_meet_are_counted_together() -> None:
    scheduler = lr_scheduler.MultiStepLR(optimizer(), [8, 9, 9, 20])
    scale_pytorch_scheduler(scheduler, 0.5)

    assert Counter({4: 3, 10: 1}) == scheduler.milestones


def test_a_ratio_of_1_changes_nothing_whatever_the_scheduler() -> None:
    scheduler = lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5)
    before = copy.copy(scheduler.state_dict())
    scale_pytorch_scheduler(scheduler, 1.0)

    assert before == scheduler.state_dict()


@pytest.mark.parametrize("ssr", [0.0, -1.0])
def test_a_ratio_must_be_positive(ssr: float) -> None:
    with pytest.raises(ValueError, match=f"`ssr` must be positive, got {ssr}"):
        scale_pytorch_scheduler(lr_scheduler.StepLR(optimizer(), 8), ssr)


def test_other_schedulers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`scheduler` must be a StepLR.*got LambdaLR"):
        scale_pytorch_scheduler(lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5), 0.5)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda o: lr_scheduler.StepLR(o, 3), "step_size"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 3), "T_max"),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3), "T_i"),
    ],
)
def test_a_ratio_that_leaves_nothing_is_refused(make: Make, name: str) -> None:
    with pytest.raises(ValueError, match=f"`ssr` must not scale `{name}` to nothing, got 0.25 for {name}=3"):
        scale_pytorch_scheduler(make(optimizer()), 0.25)
