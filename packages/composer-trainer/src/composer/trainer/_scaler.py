"""A gradient scaler for optimizers that run the forward and backward pass themselves, as often as they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

__all__ = ["ClosureGradScaler"]


class ClosureGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for optimizers whose `step` takes a closure.

    `step(optimizer, closure)` hands the optimizer a closure that clears the gradients, runs the given one, unscales
    the gradients and looks for infinities. It returns the loss, or None if any gradient overflowed: the optimizer must
    then skip what it wanted to do with the gradients.
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
            # The one host read that gradient scaling needs; torch's own `step` does the same.
            overflow = sum(found.item() for found in state["found_inf_per_device"].values())
            return None if overflow else loss

        return optimizer.step(closure=unscaled_closure)
