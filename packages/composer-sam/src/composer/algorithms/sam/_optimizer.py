"""The optimizer around the optimizer. Symbols: w are the weights, g the gradient, e the step to the worst neighbour."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from composer.algorithms.sam._arguments import check_arguments, check_base
from composer.algorithms.sam._replay import RandomState
from composer.utils import local_part

__all__ = ["SAMOptimizer"]

Tensors = list[torch.Tensor]


class SAMOptimizer(torch.optim.Optimizer):
    """Steps another optimizer with the gradient at the worst point of a neighbourhood of the weights.

    One step computes the gradient g at the weights w, goes to w + e, computes the gradient there, goes back to w and
    lets the base optimizer step with that second gradient:

        e = rho * g / (||g|| + epsilon), with the L2 norm over all gradients

    The norm stays on the device. The weights come back bit for bit, also if the second pass fails.

    This and the base optimizer are two views of one: they share `param_groups`, whose groups gain `rho`, `epsilon` and
    `global_step`, and `state`. So schedulers, surgery and checkpoints work with either, before and after wrapping.

    Args:
        base_optimizer: Makes the step; its own `step` must not need a closure.
        rho: At least 0; the radius of the neighbourhood. A parameter group may have its own.
        epsilon: Positive; keeps a gradient of zero from dividing by zero.
        interval: Look at the neighbourhood in every so many steps; the others cost one pass.
        sync_ascent: Whether all ranks climb along the gradient of the whole batch.
        **kwargs: Defaults of further entries of the parameter groups.

    Attributes:
        base_optimizer: The optimizer that makes the step.
        interval: As given.
        sync_ascent: As given.
        global_step: Steps taken.

    Raises:
        TypeError: `base_optimizer` is no optimizer.
        ValueError: It needs a closure itself or is a wrapper with groups or state of its own, `rho` is negative,
            `epsilon` is not positive or `interval` is below 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = weight.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)  # the gradient at 1 + 0.5 is 3
        >>> round(weight.item(), 3)
        0.7

    Source: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
        algorithm 1 with p = 2.
    Differs: `interval`. See `SAM` for the rest.
    """

    _step_supports_amp_closure = True

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        rho: float = 0.05,
        epsilon: float = 1e-12,
        interval: int = 1,
        sync_ascent: bool = False,
        **kwargs: Any,
    ) -> None:
        check_arguments(rho, epsilon, interval)
        check_base(base_optimizer)
        self.base_optimizer, self.interval, self._is_built = base_optimizer, interval, False
        self.sync_ascent = sync_ascent
        groups, state = base_optimizer.param_groups, base_optimizer.state
        try:
            super().__init__(groups, {"rho": rho, "epsilon": epsilon, "global_step": 0, **kwargs})
        finally:
            # Torch's constructor assigned new ones, which the properties below passed on.
            base_optimizer.param_groups, base_optimizer.state = groups, state
        self._is_built = True

    # Both belong to the base optimizer, so that they are one even after it has loaded or replaced them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the base optimizer."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of the base optimizer; this one needs none between steps."""
        return self.base_optimizer.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.base_optimizer.state = value

    @property
    def global_step(self) -> int:
        """Steps taken. Kept in the parameter groups, so it is saved and loaded with them."""
        step: int = self._setting(self.param_groups[0], "global_step")
        return step

    @global_step.setter
    def global_step(self, value: int) -> None:
        for group in self.param_groups:
            group["global_step"] = value

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Run the closure, twice in every `interval`-th step, and step the base optimizer.

        Both passes of a step draw the same random numbers: dropout masks, mixed pairs and the like stay what they are.

        Args:
            closure: Clears the gradients, computes new ones and returns the loss, or None if they are not usable
                because they overflowed; then the weights stay. If it takes them, it gets the keywords
                `ddp_sync` for the first of two passes, True if its gradients must be exchanged between ranks, and
                `loss_dict={}` for the second, whose loss is not the one to log.

        Returns:
            What the closure returned first.

        Raises:
            TypeError: There is no closure.
        """
        if closure is None:
            raise TypeError(
                "`closure` must be given: `SAMOptimizer` computes two gradients in one step. Pass a function that "
                "clears the gradients, runs the forward and backward pass and returns the loss."
            )
        with torch.enable_grad():
            if (self.global_step + 1) % self.interval == 0:
                loss, usable = self._two_passes(closure)
            else:
                loss = closure()
                usable = loss is not None
        if usable:
            self.base_optimizer.step()
        self.global_step += 1
        return loss

    def _two_passes(self, closure: Callable[..., Any]) -> tuple[Any, bool]:
        """Leave the second gradient in place; return the first loss and whether that gradient is usable."""
        random = RandomState(p.device for group in self.param_groups for p in group["params"])
        loss = _call(closure, ddp_sync=self.sync_ascent)
        if loss is None:
            return loss, False
        weights, kept = self._climb()
        random.restore()
        try:
            second = _call(closure, loss_dict={})
        finally:
            _write(weights, kept)
            torch.clear_autocast_cache()
        return loss, second is not None

    @torch.no_grad()
    def _climb(self) -> tuple[Tensors, Tensors]:
        """Go from w to w + e; return the weights and copies of what they were."""
        alike: dict[tuple[Any, ...], tuple[Tensors, Tensors]] = {}
        for group in self.param_groups:
            rho, epsilon = self._setting(group, "rho"), self._setting(group, "epsilon")
            for weight in group["params"]:
                if weight.grad is not None:
                    some, slopes = alike.setdefault((rho, epsilon, weight.device, weight.dtype), ([], []))
                    some.append(weight)
                    slopes.append(weight.grad)
        weights = [weight for some, _ in alike.values() for weight in some]
        kept = [torch.empty_like(weight) for weight in weights]
        _write(kept, weights)
        norm = torch.nn.utils.get_total_norm([slope for _, slopes in alike.values() for slope in slopes])
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # in float16 epsilon would be zero
        for (rho, epsilon, device, _), (some, slopes) in alike.items():
            # The closure clears the gradients next, so they may become e in place.
            torch._foreach_mul_(slopes, (rho / (norm + epsilon)).to(device, non_blocking=True))
            torch._foreach_add_(some, slopes)
        torch.clear_autocast_cache()  # it would hand the next pass the weights of this one
        return weights, kept

    def _setting(self, group: dict[str, Any], name: str) -> Any:
        # A group that came through the base optimizer, added or loaded, may lack it.
        return group.get(name, self.defaults[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them instead of writing zeros.
        """
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to both optimizers.

        Args:
            param_group: `{"params": ...}` and settings that differ from the defaults of either.
        """
        if not self._is_built:  # the groups of the base optimizer
            super().add_param_group(param_group)
            return
        self.base_optimizer.add_param_group(param_group)
        for name, value in {**self.defaults, "global_step": self.global_step}.items():
            self.param_groups[-1].setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both optimizers; `state_dict` may also be one of the base optimizer alone.

        Args:
            state_dict: A dictionary returned by `state_dict`.
        """
        # Other implementations keep e in the state, which the base optimizer would take for its own.
        state = {
            key: {name: value for name, value in own.items() if name != "e_w"}
            for key, own in state_dict["state"].items()
            if own.keys() != {"e_w"}
        }
        self.base_optimizer.load_state_dict({**state_dict, "state": state})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "base_optimizer": self.base_optimizer,
            "interval": self.interval,
            "sync_ascent": self.sync_ascent,
            "defaults": self.defaults,
            "_is_built": True,
        }


def _call(closure: Callable[..., Any], **keywords: Any) -> Any:
    """Call a closure with those keywords that it takes."""
    taken = inspect.signature(closure).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        keywords = {name: value for name, value in keywords.items() if name in taken}
    return closure(**keywords)


@torch.no_grad()
def _write(targets: Tensors, values: Tensors) -> None:
    if not targets:  # no parameter has a gradient, and torch takes no empty list
        return
    # `_foreach_copy_` knows no sharded tensors; their parts are plain.
    torch._foreach_copy_([local_part(target) for target in targets], [local_part(value) for value in values])
