"""The learning rate while weights are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Annealing"]


class Annealing:
    """Takes the learning rate from where it is to another one, in some steps, and keeps it there.

    After n of N steps it is `start + (swa_lr - start) * a(min(n / N, 1))`, with `a(t) = t` or, for "cos",
    `a(t) = (1 - cos(pi * t)) / 2`.

    Args:
        start: The learning rate to start from.
        swa_lr: The learning rate in the end; None: the start.
        steps: N.
        strategy: "linear" or "cos".
    """

    def __init__(self, start: float, swa_lr: float | None, steps: int, strategy: str) -> None:
        self.start = start
        self.swa_lr = start if swa_lr is None else swa_lr
        self.steps, self.strategy = steps, strategy
        self.step_count = 0

    def step(self) -> None:
        """Take a step; `set_on` makes it felt."""
        self.step_count += 1

    def set_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate of all groups.

        Args:
            optimizer: The optimizer.
        """
        t = min(self.step_count / self.steps, 1.0)
        share = t if self.strategy == "linear" else (1 - math.cos(math.pi * t)) / 2
        lr = self.swa_lr * share + self.start * (1 - share)
        _set(optimizer, [lr] * len(optimizer.param_groups))

    def release(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
        """Give the learning rate back to the run's scheduler, if there is one that says what it should be now.

        Args:
            optimizer: The optimizer.
            schedulers: The schedulers of the run.
        """
        for scheduler in schedulers:
            get_last_lr = getattr(scheduler, "get_last_lr", None)
            if get_last_lr is not None:
                _set(optimizer, [float(lr) for lr in get_last_lr()])

    def state_dict(self) -> dict[str, Any]:
        """Both learning rates and the number of steps taken."""
        return {"start": self.start, "swa_lr": self.swa_lr, "step_count": self.step_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: A dictionary returned by `state_dict`.
        """
        self.start, self.swa_lr, self.step_count = state["start"], state["swa_lr"], state["step_count"]


def _set(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
