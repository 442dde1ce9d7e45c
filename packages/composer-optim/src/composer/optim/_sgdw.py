"""SGD with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT, _default_to_fused_or_foreach
from torch.optim.sgd import sgd

from composer.optim._decoupled import (
    KeepsInitialLR,
    call,
    decay_,
    decay_ratio,
    dense_grads,
    initial_lr_of,
    log_if_large,
)
from composer.utils import check_finite

__all__ = ["DecoupledSGDW"]


class DecoupledSGDW(KeepsInitialLR, SGD):
    """SGD with momentum that decays weights by `lr / initial_lr * weight_decay`.

    With the gradient g and the momentum buffer b, which begins as a copy of the first gradient, a step is

        b = momentum * b + (1 - dampening) * g
        d = g + momentum * b if nesterov else b
        p = (1 - lr / initial_lr * weight_decay) * p - lr * d

    `initial_lr` is the learning rate that a parameter group begins with, so the decay follows the shape of the schedule
    but not its peak: useful values are much smaller than with `torch.optim.SGD`. The ratio is 1 where `initial_lr` is
    0.

    `group["initial_lr"]` is the entry that torch's schedulers use. `state[p]["momentum_buffer"]` is b, or None if
    `momentum` is 0.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate: a float, or a tensor with one element.
        momentum: Momentum.
        dampening: Dampening of the momentum.
        weight_decay: Part of the weights that a step removes at the initial learning rate. From 1e-3 on a warning is
            logged.
        nesterov: Use Nesterov momentum, which needs momentum and no dampening.
        foreach: Update all parameters in a few kernels. None lets torch decide: so on accelerators, not on the CPU.
        fused: Update all parameters in one kernel, after one for the decay.

    Attributes:
        single_pass: True: `step` calls its closure at most once, before any update; the Trainer may run forward and
            backward itself.

    Raises:
        ValueError: A number is negative, or `nesterov` lacks its conditions.
        RuntimeError: `fused` and `foreach` are both set.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DecoupledSGDW([weight], lr=0.5, weight_decay=5e-4)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.9995

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 1, where
    `lr / initial_lr` is eta_t.
    Differs: the learning rate multiplies the momentum, not the gradients in it, as in torch. From the established API:
    `foreach` and `fused`, sparse gradients are refused, and groups added later get an `initial_lr` of their own.
    """

    single_pass: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_finite(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        log_if_large(weight_decay)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, foreach=foreach, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the gradients and returns the loss. It is called once, with gradients enabled.

        Returns:
            What `closure` returns; None without one.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = call(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            buffers: list[Tensor | None] = [state.get("momentum_buffer") for state in states]
            self.sgdw(
                params,
                dense_grads(params, self),
                buffers,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                initial_lr=initial_lr_of(group),
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            for state, buffer in zip(states, buffers, strict=True):
                state["momentum_buffer"] = buffer
        return loss

    @staticmethod
    def sgdw(
        params: list[Tensor],
        d_p_list: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
        *,
        weight_decay: float,
        momentum: float,
        lr: float | Tensor,
        initial_lr: float,
        dampening: float,
        nesterov: bool,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step on lists, in place; see the class for the formula.

        Args:
            params: Parameters.
            d_p_list: Their gradients.
            momentum_buffer_list: Their momentum buffers. With momentum, None is replaced by a new buffer.
            weight_decay: Part of the weights that is removed at the initial learning rate.
            momentum: Momentum.
            lr: Learning rate.
            initial_lr: The learning rate at which `weight_decay` holds as it is.
            dampening: Dampening of the momentum.
            nesterov: Use Nesterov momentum.
            maximize: Go up instead of down.
            foreach: A few kernels for all parameters; None lets torch decide.
            fused: One kernel for all parameters, after one for the decay.
            grad_scale: Divisor of the gradients, a tensor without dimensions; needs `fused`.
            found_inf: Skip the step unless this tensor without dimensions is 0; needs `fused`.
        """
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        if foreach is None and fused is None:
            fused, foreach = _default_to_fused_or_foreach(params, differentiable=False, use_fused=False)
        if weight_decay != 0:
            factor = 1 - decay_ratio(lr, initial_lr) * weight_decay
            decay_(params, factor, grouped=bool(foreach or fused), found_inf=found_inf)
        if fused and momentum != 0:
            share = dampening / momentum * (-1 if maximize else 1)
            for index, buffer in enumerate(momentum_buffer_list):
                if buffer is None:
                    momentum_buffer_list[index] = _first_buffer(d_p_list[index], share, grad_scale, found_inf)
        sgd(
            params,
            d_p_list,
            momentum_buffer_list,
            foreach=foreach,
            fused=fused,
            grad_scale=grad_scale,
            found_inf=found_inf,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
        )


def _first_buffer(grad: Tensor, share: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """The momentum buffer from which torch's fused kernel makes the first one, a copy of the gradient.

    The kernel computes `momentum * buffer + (1 - dampening) * grad` here too: its own first step needs all parameters
    to be new, and leaves uninitialized memory behind if it is skipped because of `found_inf`.
    """
    if share == 0:
        return torch.zeros_like(grad)
    buffer = grad * share
    if grad_scale is not None:
        buffer = buffer / grad_scale.to(grad.device)
    if found_inf is not None:
        buffer = torch.where(found_inf.to(grad.device) == 0, buffer, 0.0)
    return buffer.to(grad.dtype)
