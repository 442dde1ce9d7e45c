"""Activations that are computed again in the backward pass, or wait for it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from composer.distributed._units import Unit

__all__ = ["apply_ac", "lighten_activations"]


def lighten_activations(
    model: torch.nn.Module, units: Sequence[Unit], recompute: bool = True, offload: bool = False
) -> list[str]:
    """Let some modules keep less for the backward pass on the device.

    These are the modules with an attribute `_activation_checkpointing = True` and those for which the
    `activation_checkpointing_fn(module)` of a child of the model says so; if there is neither, the inner units.

    Args:
        model: The model.
        units: Its units.
        recompute: Whether they keep their inputs only, and compute the rest again.
        offload: Whether what they keep waits in host memory.

    Returns:
        The names of the modules.

    Raises:
        ValueError: Nothing tells which modules are meant.
    """
    chosen: list[str] = []
    for top, child in model.named_children():
        asks: Callable[[torch.nn.Module], Any] = getattr(child, "activation_checkpointing_fn", _says_nothing)
        for name, module in child.named_modules(prefix=top):
            own = getattr(module, "_activation_checkpointing", None)
            if own or (own is None and asks(module)):
                chosen.append(name)
    if not chosen:
        chosen = [unit.name for unit in units if "." in unit.name]
    if not chosen:
        raise ValueError(
            "`activation_checkpointing` or `activation_cpu_offload` is on, but nothing tells which modules are meant. "
            "Give the model inside the `ComposerModel` a method `activation_checkpointing_fn(module)`, or set "
            "`_activation_checkpointing = True` on the modules."
        )
    for name in chosen:
        apply_ac(model.get_submodule(name), recompute, offload)
    return chosen


def apply_ac(module: torch.nn.Module, recompute: bool = True, offload: bool = False) -> None:
    """Let a module keep less for the backward pass on the device. Its names and its class stay.

    Args:
        module: The module.
        recompute: Whether it keeps its inputs only, and computes the rest again.
        offload: Whether what it keeps waits in host memory.
    """
    # On the object, not around it: a wrapper would rename the parameters.
    module.forward = partial(_forward, module.forward, recompute, offload)


def _forward(forward: Callable[..., Any], recompute: bool, offload: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
        if recompute:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)


def _says_nothing(module: torch.nn.Module) -> bool:
    return False
