"""What AdamW tells about its parameters: norms, also of parameters in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer.optim._decoupled import decay_ratio
from composer.utils import dist

__all__ = ["METRIC_FUNCTIONS", "Metric", "adamw_update", "root_of_sum_over_ranks"]

Metric = Callable[[Tensor, dict[str, Any], Tensor], Tensor]


def _norm(tensor: Tensor) -> Tensor:
    """The 2-norm, of the local shard if the tensor is distributed."""
    to_local = getattr(tensor, "to_local", None)
    norm: Tensor = torch.linalg.vector_norm(tensor if to_local is None else to_local())
    return norm


def _moment(param: Tensor, state: dict[str, Any], update: Tensor) -> Tensor:
    return _norm(state["exp_avg"])


def _param(param: Tensor, state: dict[str, Any], update: Tensor) -> Tensor:
    return _norm(param.detach())


def _update(param: Tensor, state: dict[str, Any], update: Tensor) -> Tensor:
    return _norm(update)


def _grad(param: Tensor, state: dict[str, Any], update: Tensor) -> Tensor:
    assert param.grad is not None
    return _norm(param.grad)


METRIC_FUNCTIONS: dict[str, Metric] = {
    "l2_norm/moment": _moment,
    "l2_norm/param": _param,
    "l2_norm/update": _update,
    "l2_norm/grad": _grad,
}


@torch.no_grad()
def adamw_update(param: Tensor, state: dict[str, Any], group: dict[str, Any], initial_lr: float) -> Tensor:
    """What a step of AdamW adds to `param`, decay included, by the state after it. Shape and dtype of `param`."""
    beta1, beta2 = group["betas"]
    step: Tensor = state["step"]
    mean: Tensor = state["exp_avg"]
    squares: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    step_size = -group["lr"] / (1 - beta1**step)
    divisor = squares.sqrt() / (1 - beta2**step).sqrt() + group["eps"]
    decay = group["weight_decay"] * decay_ratio(group["lr"], initial_lr)
    update: Tensor = mean / divisor * step_size - param.detach() * decay
    return update


def root_of_sum_over_ranks(squares: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The square root of every entry's sum over the ranks; an entry that a rank lacks counts as 0 there."""
    names = sorted(set().union(*dist.all_gather_object(list(squares))))
    if not names:
        return {}
    zero = torch.zeros((), device=device)
    sums = torch.stack([squares.get(name, zero).to(device, torch.float32) for name in names])
    dist.all_reduce(sums, reduce_operation="SUM")
    return dict(zip(names, sums.sqrt().unbind(), strict=True))
