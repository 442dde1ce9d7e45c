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
    the gradients and looks for infinities. It returns the loss, or None if any gradient overflowed on any rank: the
    optimizer must then skip what it wanted to do with the gradients.
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
            What the optimizer's `step` returned.
        """
        if closure is None:
            return super().step(optimizer, *args, **kwargs)

        def unscaled_closure(**closure_kwargs: Any) -> Any:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = OptState.READY
            state["found_inf_per_device"] = {}
            optimizer.zero_grad(set_to_none=True)
            loss = closure(**closure_kwargs)
            if state["stage"] is OptState.READY:  # the closure may have unscaled already
                self.unscale_(optimizer)
            return None if self._overflowed(state["found_inf_per_device"]) else loss

        return optimizer.step(closure=unscaled_closure)

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
