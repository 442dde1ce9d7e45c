"""Materialize modules before they are sharded: with the weights of rank 0, or initialized if on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed

from composer.distributed.ddp import exchange
from composer.utils import dist, reproducibility


def uninitialized(model: torch.nn.Module, host_group: Any = None) -> set[torch.nn.Module]:
    """Return the modules to initialize: those on the meta device on rank 0. A collective operation.

    Raises:
        ValueError: Such a module is not on the meta device on another rank.
    """
    local = {name for name, module in model.named_modules() if any(tensor.is_meta for tensor in _tensors(module))}
    on_meta = dist.all_gather_object(local, host_group)
    for rank, names in enumerate(on_meta):
        if on_meta[0] - names:
            raise ValueError(
                f"Detected mixed initialization: {min(on_meta[0] - names)!r} is on the meta device on rank 0, but "
                f"not on rank {rank}. All ranks start from the weights of rank 0, so build the model on rank 0 and "
                f"on the meta device elsewhere, or on the meta device on all ranks."
            )
    return {model.get_submodule(name) for name in on_meta[0]}


def materialize(
    modules: Collection[torch.nn.Module],
    device: torch.device,
    fresh: Collection[torch.nn.Module],
    init_fn: Callable[[torch.nn.Module], Any] | None,
) -> None:
    """Move the parameters and buffers of modules to the device, with equal values on all ranks. A collective operation.

    Args:
        modules: The modules; their children are not changed.
        device: The device.
        fresh: The modules to initialize. The others get the values of rank 0.
        init_fn: Initializes one module; None: its `reset_parameters` does.

    Raises:
        ValueError: A module has no way to be initialized.
    """
    for module in modules:
        _to(module, device)
    for module in modules:
        if module not in fresh:
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if init_fn is not None:
            init_fn(module)
        elif callable(reset):
            reset()
        else:
            raise ValueError(
                f"`{type(module).__name__}` is on the meta device and cannot be initialized. Give it a "
                f"method `reset_parameters()`, or the model a method `param_init_fn(module)`."
            )
    # Keyed by identity, because tied parameters must be broadcast only once.
    tensors = {id(tensor): tensor.detach() for module in modules for tensor in _tensors(module)}
    exchange(tensors.values(), lambda tensor: torch.distributed.broadcast(tensor, 0, async_op=True))


def place_model(model: torch.nn.Module, device: torch.device, seed: int, host_group: Any = None) -> None:
    """Move a model to the device, with equal values on all ranks. A collective operation.

    Args:
        model: The model.
        device: The device.
        seed: The seed for initializing modules on the meta device; the same on every rank.
        host_group: A process group for host values; None: the default one.

    Raises:
        ValueError: The model is on the meta device on rank 0 only, or a module has no way to be initialized.
    """
    fresh = uninitialized(model, host_group)
    with reproducibility.seed_context(seed):
        for name, child in model.named_children():
            materialize([*child.modules()], device, fresh, init_fn_of(model, name))
        materialize([model], device, fresh, init_fn_of(model, ""))


def init_fn_of(model: torch.nn.Module, name: str) -> Callable[[torch.nn.Module], Any] | None:
    """Return the `param_init_fn` for a module: that of the child it belongs to, or that of the model, or None."""
    child = model.get_submodule(name.partition(".")[0])
    return getattr(child, "param_init_fn", None) or getattr(model, "param_init_fn", None)


def own_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and the modules inside it that are not sharded yet."""
    from torch.distributed.fsdp import FSDPModule

    units = (inner for inner in module.modules() if isinstance(inner, FSDPModule) and inner is not module)
    sharded = {inner for unit in units for inner in unit.modules()}
    return [inner for inner in module.modules() if inner not in sharded]


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    # Models override `parameters()`, for example to return only those that are trained.
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _to(module: torch.nn.Module, device: torch.device) -> None:
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if parameter.is_meta:
            # Keep the object, so that tied weights and other references stay valid.
            real = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
        else:
            parameter.data = parameter.data.to(device)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
