"""`scale_scheduler` against schedulers made for the new length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from composer import functional as cf
from composer.algorithms.scale_schedule import scale_scheduler


def rates(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def scaled(make: Callable[[torch.optim.Optimizer], Any], ssr: float) -> Callable[[torch.optim.Optimizer], Any]:
    def made(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = make(optimizer)
        scale_scheduler(scheduler, ssr)
        return scheduler

    return made


def test_the_registered_function_is_this_one() -> None:
    assert cf.scale_scheduler is scale_scheduler


@pytest.mark.parametrize("ssr", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda o, r: lrs.StepLR(o, int(6 * r), gamma=0.5),
        lambda o, r: lrs.MultiStepLR(o, [int(4 * r), int(8 * r), int(8 * r)], gamma=0.5),
        lambda o, r: lrs.CosineAnnealingLR(o, int(12 * r)),
        lambda o, r: lrs.CosineAnnealingWarmRestarts(o, int(4 * r), T_mult=2),
        lambda o, r: lrs.ExponentialLR(o, 0.9 ** (1 / r)),
        lambda o, r: lrs.ConstantLR(o, 0.5, 3),
    ],
    ids=["step", "steps", "cosine", "restarts", "exponential", "constant"],
)
def test_a_scaled_scheduler_is_one_of_another_length(
    make: Callable[[torch.optim.Optimizer, float], Any], ssr: float
) -> None:
    expected = rates(lambda o: make(o, ssr), 24)

    assert pytest.approx(expected) == rates(scaled(lambda o: make(o, 1.0), ssr), 24)


def test_exponential_decay_reaches_the_same_at_the_scaled_time() -> None:
    whole, half = (rates(scaled(lambda o: lrs.ExponentialLR(o, 0.9), ssr), 21) for ssr in (1.0, 0.5))

    assert pytest.approx(whole[20]) == half[10]


@pytest.mark.parametrize(("warmup", "expected"), [(None, 45), (90, 45), (100, 40), (50, 45)])
def test_a_warmup_before_a_cosine_keeps_its_length(warmup: int | None, expected: int) -> None:
    scheduler = lrs.CosineAnnealingLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0), 90)
    scale_scheduler(scheduler, 0.5, warmup)

    assert expected == scheduler.T_max


def test_a_scheduler_may_scale_itself() -> None:
    class Own(lrs.StepLR):
        def scale_schedule(self, ssr: float) -> None:
            self.ratio = ssr

    scheduler = Own(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0), 10)
    scale_scheduler(scheduler, 0.5)

    assert (0.5, 10) == (scheduler.ratio, scheduler.step_size)


def test_schedulers_that_cannot_be_scaled_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    with pytest.raises(ValueError, match=r"must have a method `scale_schedule\(ssr\)` or .* got ReduceLROnPlateau"):
        scale_scheduler(lrs.ReduceLROnPlateau(optimizer), 0.5)
    with pytest.raises(ValueError, match=r"`ssr` must not scale `step_size` to nothing, got 0\.1 for step_size=5"):
        scale_scheduler(lrs.StepLR(optimizer, 5), 0.1)
    with pytest.raises(ValueError, match=r"`ssr` must not scale `T_max` to nothing, got 0\.1 for T_max=50"):
        scale_scheduler(lrs.CosineAnnealingLR(optimizer, 50), 0.1, 60)
    with pytest.raises(ValueError, match=r"`ssr` must be positive, got 0"):
        scale_scheduler(lrs.StepLR(optimizer, 5), 0)
