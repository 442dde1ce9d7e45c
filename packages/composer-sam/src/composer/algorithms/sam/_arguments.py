"""Whether SAM can work with what it is given."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from composer.utils import check_finite, check_integers
from composer.utils.module_surgery import has_own_state_dict

__all__ = ["check_arguments", "check_base"]


def check_arguments(rho: float, epsilon: float, interval: int) -> None:
    """Raise ValueError unless the arguments of `SAM` are in range."""
    check_finite(rho=rho, epsilon=epsilon)
    check_integers(interval=interval)
    if rho < 0:
        raise ValueError(f"`rho` must not be negative, got {rho!r}. Use 0.05, or more with a larger `interval`.")
    if epsilon <= 0:
        raise ValueError(
            f"`epsilon` must be positive, got {epsilon!r}. It keeps a zero gradient from dividing by zero."
        )
    if interval < 1:
        raise ValueError(f"`interval` must be at least 1, got {interval!r}. Use `interval=1` to act in every step.")


def check_base(base_optimizer: Any) -> None:
    """Raise unless it is an optimizer that steps without a closure."""
    if not isinstance(base_optimizer, torch.optim.Optimizer):
        raise TypeError(f"`base_optimizer` must be a `torch.optim.Optimizer`, got {type(base_optimizer).__name__}.")
    groups = inspect.getattr_static(base_optimizer, "param_groups", None)
    if has_own_state_dict(base_optimizer) or (isinstance(groups, property) and groups.fset is None):
        raise ValueError(
            f"`base_optimizer` must keep its parameter groups and state as torch's optimizers do, got "
            f"{type(base_optimizer).__name__}, a wrapper with others. Use SAM with the optimizer inside it, or leave "
            f"SAM out."
        )
    closure = inspect.signature(inspect.unwrap(type(base_optimizer).step)).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    declared = any(getattr(base_optimizer, name, False) for name in ("_step_supports_amp_closure", "needs_closure"))
    if required or declared:
        raise ValueError(
            f"`base_optimizer` must step without a closure, got {type(base_optimizer).__name__}, which runs the "
            f"forward and backward pass itself. Use one such as `torch.optim.SGD`."
        )
