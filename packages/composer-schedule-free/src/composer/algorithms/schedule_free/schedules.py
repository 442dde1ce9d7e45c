"""Find schedulers that would lower the learning rate, before the run begins."""

from __future__ import annotations

import copy
import datetime
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from composer.core import Timestamp, TimeUnit
from composer.utils import dist

if TYPE_CHECKING:
    from composer.core import State

_MOST_STEPS = 10_000
_TOLERANCE = 1e-9  # relative; the recursive formulas of torch round


def has_fallen(rate: Any, highest: Any) -> bool:
    """Return True if a learning rate is below the highest so far; False for tensors, which are not read."""
    return isinstance(rate, float) and isinstance(highest, float) and rate < highest * (1 - _TOLERANCE)


def check_schedulers(state: State, groups: list[dict[str, Any]]) -> None:
    """Check that no scheduler lowers the learning rate of some parameter groups until the end of the run.

    Copies of the schedulers are stepped on copies of the groups, at the times of all remaining batches, or of 10,000 of
    them. A schedule in a unit that cannot be predicted, such as tokens, may still fall.

    Args:
        state: The state of the run; its timestamp is changed and restored.
        groups: The parameter groups.

    Raises:
        ValueError: A scheduler lowers a rate.
    """
    for scheduler in state.schedulers:
        target = getattr(scheduler, "optimizer", None)
        if target is None or not any(group is other for group in target.param_groups for other in groups):
            continue
        fall = _fall_of(scheduler, state)
        if fall is not None:
            name = type(getattr(scheduler, "schedule", scheduler)).__name__  # of composer.optim: the schedule compiled
            raise ValueError(
                f"`schedulers` must not lower the learning rate with `ScheduleFree`, whose average takes the place of "
                f"a decay, but {name} lowers it from {fall[0]:.4g} to {fall[1]:.4g}. Remove it, or "
                f"use a constant schedule or one with only a warmup, such as `ConstantWithWarmupScheduler`."
            )


def _fall_of(scheduler: Any, state: State) -> tuple[float, float] | None:
    """Return a learning rate and a lower one that follows; None if it does not fall."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]
    groups = [{**copy.deepcopy(each), "params": [torch.zeros(1, requires_grad=True)]} for each in settings]
    double = _copied(scheduler, torch.optim.SGD(groups, lr=0.0))
    highest = [float(group["lr"]) for group in groups]
    now = state.timestamp
    try:
        for timestamp in _timestamps(state):
            state.timestamp = timestamp
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the optimizer, a copy, has not stepped
                double.step()
            for index, group in enumerate(double.optimizer.param_groups):
                rate = float(group["lr"])
                if has_fallen(rate, highest[index]):
                    return highest[index], rate
                highest[index] = max(highest[index], rate)
    except Exception:  # noqa: BLE001 - a user's function, such as a table, may end before this time
        return None
    finally:
        state.timestamp = now
    return None


def _copied(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a copy of a torch scheduler for another optimizer, with copies of the schedulers that it consists of."""
    double = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if isinstance(value, (list, dict)):
            setattr(double, name, copy.copy(value))
    double.optimizer = optimizer
    if hasattr(scheduler, "_schedulers"):
        double._schedulers = [_copied(each, optimizer) for each in scheduler._schedulers]
    return double


def _timestamps(state: State) -> Iterator[Timestamp]:
    """Iterate over the times after the remaining batches of the run, as far as they can be predicted."""
    now, end = state.timestamp, state.max_duration
    batch, length = now.batch.value, state.dataloader_len
    samples, tokens = _per_batch(state)
    per_epoch = None if length is None else length.value
    left: float | None = None
    if end is not None:
        rates = {TimeUnit.BATCH: 1, TimeUnit.EPOCH: per_epoch and 1 / per_epoch}
        rate = (rates | {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: tokens}).get(end.unit)
        left = (end.value - now.get(end.unit).value) / rate if rate else None
    number = max(1, min(int(1000 if left is None else left), _MOST_STEPS))
    for step in range(1, number + 1):
        done = round((number if left is None else left) * step / number)
        changes: dict[str, Any] = {
            "batch": batch + done,
            "sample": round(now.sample.value + done * samples),
            "token": round(now.token.value + done * tokens),
        }
        if per_epoch:
            in_epoch = now.batch_in_epoch.value + done
            changes |= {"epoch": now.epoch.value + in_epoch // per_epoch, "batch_in_epoch": in_epoch % per_epoch}
        if end is not None and end.unit is TimeUnit.SECOND:
            spent = now.total_wct.total_seconds()
            changes["total_wct"] = datetime.timedelta(seconds=spent + (end.value - spent) * step / number)
        yield now.copy(**changes)


def _per_batch(state: State) -> tuple[float, float]:
    """Return the samples and tokens per batch so far, or the batch size of the loader; 0 if unknown."""
    now = state.timestamp
    if now.batch.value:
        return now.sample.value / now.batch.value, now.token.value / now.batch.value
    size = getattr(state.dataloader, "batch_size", None)
    return (size if isinstance(size, int) else 0) * dist.get_world_size(), 0
