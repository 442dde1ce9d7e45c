"""What both optimizers share: the initial learning rate of each group, the decay it scales, and checks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["KeepsInitialLR", "call", "decay_", "decay_ratio", "dense_grads", "initial_lr_of", "log_if_large"]

log = logging.getLogger("composer.optim.decoupled_weight_decay")


class KeepsInitialLR(Optimizer):
    """An optimizer whose groups know the learning rate they began with: `group["initial_lr"]`, a float.

    It is set when a group is added, because code that steps with a zero learning rate to make the optimizer's state
    (`torch.distributed.checkpoint` does) would otherwise be taken at its word. A learning rate scheduler of torch reads
    the same entry.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as in torch; `initial_lr` is the group's `lr` unless given."""
        super().add_param_group(param_group)
        initial_lr_of(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading replaces the groups, and the optimizers of torch do not save `initial_lr`.
        before = [group.get("initial_lr") for group in self.__dict__.get("param_groups", ())]
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            if index < len(before) and before[index] is not None:
                group.setdefault("initial_lr", before[index])
            initial_lr_of(group)


def initial_lr_of(group: dict[str, Any]) -> float:
    """The initial learning rate of a group; its learning rate now if it has none yet."""
    initial_lr = group.setdefault("initial_lr", group["lr"])
    if isinstance(initial_lr, Tensor):  # once per group: a scheduler writes into the learning rate tensor itself
        group["initial_lr"] = initial_lr = float(initial_lr)
    return float(initial_lr)


def decay_ratio(lr: float | Tensor, initial_lr: float) -> float | Tensor:
    """The part of the weight decay that applies now: `lr / initial_lr`; 1 where that is undefined."""
    return lr / initial_lr if initial_lr else 1.0


def decay_(params: list[Tensor], factor: float | Tensor, *, grouped: bool, found_inf: Tensor | None = None) -> None:
    """Multiply the parameters by `factor`, in place.

    Args:
        params: The parameters.
        factor: A number or a tensor without dimensions.
        grouped: Multiply all parameters of a dtype in one kernel.
        found_inf: Tensor without dimensions; unless it is 0 the step is skipped, so nothing changes.
    """
    if found_inf is not None:
        factor = torch.where(found_inf == 0, factor, 1.0)
    if not grouped or not params:
        for param in params:
            param.mul_(factor)
        return
    if not isinstance(factor, Tensor) and len({param.dtype for param in params}) == 1:
        torch._foreach_mul_(params, factor)  # nearly always so, and grouping costs as much as the kernel
        return
    for (device, _), ((tensors,), _) in Optimizer._group_tensors_by_device_and_dtype([[*params]]).items():
        if isinstance(factor, Tensor):
            torch._foreach_mul_(cast("list[Tensor]", tensors), factor.to(device, non_blocking=True))
        else:
            torch._foreach_mul_(cast("list[Tensor]", tensors), factor)


def log_if_large(weight_decay: float) -> None:
    if weight_decay >= 1e-3:
        log.warning(
            "`weight_decay` of a decoupled optimizer is not multiplied by the learning rate, so %g is much: every step "
            "removes that part of the weights. For the decay of a torch optimizer with the learning rate lr and the "
            "weight decay wd, use lr * wd.",
            weight_decay,
        )


def call(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def dense_grads(params: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    grads = [cast("Tensor", param.grad) for param in params]
    if any(grad.layout is not torch.strided for grad in grads):
        raise RuntimeError(
            f"Gradients must be dense for {type(optimizer).__name__}, got a sparse one. "
            f"Make the layer with `sparse=False`, or optimize it with `torch.optim.SparseAdam`."
        )
    return grads
