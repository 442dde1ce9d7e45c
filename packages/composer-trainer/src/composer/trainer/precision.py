"""Gradient scaling of fp16 for several optimizers, and for those that call a closure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from composer.utils import dist


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Unscale the gradients of all optimizers. If one overflows, all skip the step, like groups of one optimizer."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if len(optimizers) > 1:
        found = [tensor for optimizer in optimizers for tensor in _overflows_of(scaler, optimizer).values()]
        if found:
            worst = torch.stack([tensor.to(found[0].device) for tensor in found]).max()
            for tensor in found:
                tensor.copy_(worst)


def step_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer after `unscale`, unless the gradients overflowed or it has none, as one of several may."""
    if _overflows_of(scaler, optimizer):
        scaler.step(optimizer)


def _overflows_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """Return 1.0 by device where gradients of the optimizer overflowed, else 0.0."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


class ClosureGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for optimizers whose `step` calls a closure.

    `step(optimizer, closure=closure)` passes the optimizer a closure that clears the gradients, runs the given one,
    unscales the gradients and checks them for infinities. It returns the loss. If a gradient overflowed on any rank,
    the closure returns None to optimizers that declare `_step_supports_amp_closure = True`, which then skip the step
    themselves. The step of any other optimizer is aborted and its weights are restored.
    """

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        closure: Callable[..., Any] | None = None,
        others: Sequence[torch.optim.Optimizer] = (),
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer.

        Args:
            optimizer: Calls the closure that it is given; each call is one forward and backward pass.
            *args: Passed to torch's scaler when there is no closure.
            closure: Computes the scaled gradients and returns the loss. None: the gradients are already computed.
            others: Optimizers that step afterwards with the gradients of the last pass. They are unscaled with it.
            **kwargs: Passed to torch's scaler when there is no closure.

        Returns:
            The return value of the optimizer's `step`; None if the step was aborted.
        """
        if closure is None:
            return super().step(optimizer, *args, **kwargs)
        accepts_none = getattr(optimizer, "_step_supports_amp_closure", False)
        optimizers = (optimizer, *others)

        def unscaled_closure(**closure_kwargs: Any) -> Any:
            states = [self._per_optimizer_states[id(each)] for each in optimizers]
            for each, state in zip(optimizers, states, strict=True):
                state["stage"] = OptState.READY
                state["found_inf_per_device"] = {}
                each.zero_grad(set_to_none=True)
            loss = closure(**closure_kwargs)
            if states[0]["stage"] is OptState.READY:  # the closure may have unscaled already
                unscale(self, optimizers)
            if not self._overflowed([tensor for state in states for tensor in state["found_inf_per_device"].values()]):
                return loss
            if accepts_none:
                return None
            raise _OverflowError

        if accepts_none:
            return optimizer.step(closure=unscaled_closure)
        # The optimizer may move the weights between two passes, as LBFGS does in its line search.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        weights = [parameter.detach().clone() for parameter in parameters]
        try:
            return optimizer.step(closure=unscaled_closure)
        except _OverflowError:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
            return None

    def _overflowed(self, found_inf: Sequence[torch.Tensor]) -> bool:
        """Return True if a gradient of any rank overflowed; `update` then reduces the scale on all ranks."""
        # A pass without gradient synchronization may overflow on some ranks only, and all must take the same branch.
        device = torch.device("cpu") if self._scale is None else self._scale.device
        worst = torch.stack(
            [torch.zeros((), device=device), *(found.to(device).reshape(()) for found in found_inf)]
        ).max()
        dist.all_reduce(worst, "MAX")
        for found in found_inf:
            found.fill_(worst)
        # The one host read that gradient scaling needs; torch's own `step` does the same.
        return bool(worst.item())


class _OverflowError(Exception):
    """Aborts the step of an optimizer that cannot handle an overflow itself."""
