"""Helpers of algorithms that change weights after a step of the optimizers: copies before it, weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer.utils.misc import local_part

Rate = float | Tensor


@dataclass(frozen=True)
class WeightsBeforeStep:
    """Weights before a step, and the learning rates of the step.

    Attributes:
        names: The names of the weights.
        previous: Copies of the weights, in this order; of a `DTensor`, its local part.
        rates: The learning rate of the parameter group of each weight. Schedulers change those of the groups before
            BATCH_END, so that they are those of the next step there.
    """

    names: list[str]
    previous: list[Tensor]
    rates: list[Rate]


@torch.no_grad()
def copy_before_step(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, nn.Parameter]
) -> WeightsBeforeStep:
    """Copy the weights that optimizers have, at AFTER_TRAIN_BATCH; nothing is read from a device.

    Args:
        optimizers: The optimizers of the run.
        weights: Weights by name; those in no optimizer, such as weights that have been frozen, are left out.
    """
    rates: dict[int, Rate] = {
        id(parameter): group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = [name for name, weight in weights.items() if id(weight) in rates]
    current = [local_part(weights[name]) for name in names]
    previous = [torch.empty_like(weight) for weight in current]
    if names:  # `_foreach_copy_` rejects empty lists
        torch._foreach_copy_(previous, current)
    return WeightsBeforeStep(names, previous, [rates[id(weights[name])] for name in names])


def take_over_decay(
    owner: str,
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    lr: float | None = None,
) -> dict[str, float]:
    """Set the weight decay of some parameters to 0, before training.

    Where they share a parameter group with others, they get a group of their own.

    Args:
        owner: The class that decays or pins these weights itself, for messages.
        optimizers: The optimizers of the run.
        parameters: Parameters by name.
        lr: The learning rate of the parameters. None: that of their groups.

    Returns:
        The former weight decay by name, of those parameters that an optimizer has.

    Raises:
        ValueError: An optimizer changes weights other than those of the model.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    former: dict[str, float] = {}
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            taken = [id(parameter) in names for parameter in group["params"]]
            if not any(taken):
                continue
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                raise ValueError(
                    f"`{owner}` needs an optimizer that steps the weights of the model, but {type(optimizer).__name__} "
                    f"has `train` and `eval`: it steps other weights, and the model has a mean of them. Use another "
                    f"optimizer, or leave `{owner}` out."
                )
            decay = group.get("weight_decay", 0.0)
            former.update({names[id(p)]: decay for p, is_taken in zip(group["params"], taken, strict=True) if is_taken})
            if lr is None and (all(taken) or not decay):
                if decay:
                    group["weight_decay"] = 0.0
                continue
            _split(optimizer, group, taken, lr)
    return former


def check_schedulers(owner: str, schedulers: Iterable[Any]) -> None:
    """Check, at FIT_START, that no scheduler was made before `take_over_decay` divided groups.

    Args:
        owner: The class that called `take_over_decay`, for messages.
        schedulers: The schedulers of the run.

    Raises:
        ValueError: A scheduler has fewer learning rates than its optimizer has groups, so that it would ignore some.
    """
    for scheduler in schedulers:
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        rates = getattr(scheduler, "base_lrs", groups)
        if len(rates) < len(groups):
            raise ValueError(
                f"`schedulers` must change the learning rates of all parameter groups, but {type(scheduler).__name__} "
                f"has {len(rates)} and {type(scheduler.optimizer).__name__} {len(groups)}, since `{owner}` has given "
                f"parameters a group without weight decay. Use a schedule of `composer.optim`, compiled after INIT in "
                f"a loop of your own, or make such a group yourself, with `weight_decay=0`, and leave out `lr`."
            )


def _split(optimizer: torch.optim.Optimizer, group: dict[str, Any], taken: list[bool], lr: float | None) -> None:
    """Move parameters of a group to a new one without weight decay."""
    new = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    new["weight_decay"] = 0.0
    if isinstance(group["lr"], Tensor):  # schedulers write into it
        new["lr"] = group["lr"].clone() if lr is None else torch.full_like(group["lr"], lr)
    elif lr is not None:
        new["lr"] = lr
    if lr is not None and "initial_lr" in new:  # schedules take it for the initial rate
        new["initial_lr"] = lr
    pairs = zip(group["params"], group.get("param_names") or group["params"], taken, strict=True)
    moved = [(name, parameter) for parameter, name, is_taken in pairs if is_taken]
    new["params"] = moved if "param_names" in group else [parameter for _, parameter in moved]
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [item for item, is_taken in zip(group[key], taken, strict=True) if not is_taken]
    optimizer.add_param_group(new)
