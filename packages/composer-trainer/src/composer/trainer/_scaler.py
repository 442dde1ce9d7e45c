"""A gradient scaler for optimizers that run the forward and backward pass themselves, as often as they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from composer.utils import dist

__all__ = ["ClosureGradScaler"]


class ClosureGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for optimizers whose `step` takes a closure.

    `step(optimizer, closure)` hands the optimizer a closure that clears the gradients, runs the given one, unscales
    the gradients and looks for infinities. It returns the loss. If any gradient overflowed on any rank, it returns None
    to an optimizer that declares `_step_supports_amp_closure = True`, which then skips the step itself. The step of any
    other optimizer is broken off, and its weights are set back to what they were.
    """

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, closure: Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step the optimizer.

        Args:
            optimizer: Calls the closure it is given; each call is one forward and backward pass.
            *args: As in torch's scaler, when there is no closure.
            closure: Computes the scaled gradients and returns the loss. None: the gradients are there already.
            **kwargs: As in torch's scaler, when there is no closure.

        Returns:
            What the optimizer's `step` returned; None if it was broken off.
        """
        if closure is None:
            return super().step(optimizer, *args, **kwargs)
        knows_none = getattr(optimizer, "_step_supports_amp_closure", False)

        def unscaled_closure(**closure_kwargs: Any) -> Any:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = OptState.READY
            state["found_inf_per_device"] = {}
            optimizer.zero_grad(set_to_none=True)
            loss = closure(**closure_kwargs)
            if state["stage"] is OptState.READY:  # the closure may have unscaled already
                self.unscale_(optimizer)
            if not self._overflowed(state["found_inf_per_device"]):
                return loss
            if knows_none:
                return None
            raise _OverflowError

        if knows_none:
            return optimizer.step(closure=unscaled_closure)
        # It may move the weights between two passes, as LBFGS does in its line search.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        weights = [parameter.detach().clone() for parameter in parameters]
        try:
            return optimizer.step(closure=unscaled_closure)
        except _OverflowError:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
            return None

    def _overflowed(self, found_inf: dict[torch.device, torch.Tensor]) -> bool:
        """Whether a gradient of any rank overflowed; `update` then shrinks the scale on all of them."""
        # A pass without exchange of gradients may overflow on some ranks only, and all must take the same way.
        device = torch.device("cpu") if self._scale is None else self._scale.device
        worst = torch.stack([found.to(device) for found in found_inf.values()]).max() if found_inf else None
        worst = torch.zeros((), device=device) if worst is None else worst
        dist.all_reduce(worst, "MAX")
        for found in found_inf.values():
            found.fill_(worst)
        # The one host read that gradient scaling needs; torch's own `step` does the same.
        return bool(worst.item())


class _OverflowError(Exception):
    """Breaks off the step of an optimizer that would not notice an overflow."""
