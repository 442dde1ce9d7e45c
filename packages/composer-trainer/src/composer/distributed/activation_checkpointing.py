"""Recompute activations in the backward pass, or offload them to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from composer.distributed._units import Unit


def lighten_activations(
    model: torch.nn.Module, units: Sequence[Unit], recompute: bool = True, offload: bool = False
) -> list[str]:
    """Reduce the device memory that modules use for activations.

    These are the modules with an attribute `_activation_checkpointing = True` and those for which the
    `activation_checkpointing_fn(module)` of a child of the model returns True; without either, the inner units.

    Args:
        model: The model.
        units: Its units.
        recompute: Store only the inputs of the modules, and recompute the rest.
        offload: Store activations in host memory.

    Returns:
        The names of the modules.

    Raises:
        ValueError: No module is selected.
    """
    chosen: list[str] = []
    for top, child in model.named_children():
        select: Callable[[torch.nn.Module], Any] = getattr(child, "activation_checkpointing_fn", lambda module: False)
        for name, module in child.named_modules(prefix=top):
            attribute = getattr(module, "_activation_checkpointing", None)
            if attribute or (attribute is None and select(module)):
                chosen.append(name)
    if not chosen:
        chosen = [unit.name for unit in units if "." in unit.name]
    if not chosen:
        raise ValueError(
            "`activation_checkpointing` or `activation_cpu_offload` is on, but no module is selected. "
            "Give the model inside the `ComposerModel` a method `activation_checkpointing_fn(module)`, or set "
            "`_activation_checkpointing = True` on the modules."
        )
    for name in chosen:
        apply_ac(model.get_submodule(name), recompute, offload)
    return chosen


def apply_ac(module: torch.nn.Module, recompute: bool = True, offload: bool = False) -> None:
    """Reduce the device memory that a module uses for activations. Its parameter names and class stay the same.

    Args:
        module: The module.
        recompute: Store only its inputs, and recompute the rest.
        offload: Store activations in host memory.
    """
    # Replaces `forward` instead of wrapping the module, which would rename the parameters.
    module.forward = partial(_forward, module.forward, recompute, offload)


def _forward(forward: Callable[..., Any], recompute: bool, offload: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
        if recompute:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)
