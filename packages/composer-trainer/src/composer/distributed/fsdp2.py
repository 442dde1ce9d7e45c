"""Sharding a model with `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from composer.checkpoint.sharded_tensors import is_sharded
from composer.core import Precision
from composer.distributed._materialize import init_fn_of, materialize, own_modules, uninitialized
from composer.distributed._optimizers import OptimizerParameters
from composer.distributed._units import plan_units
from composer.distributed.activation_checkpointing import lighten_activations
from composer.utils import STR_TO_DTYPE, dist, reproducibility
from composer.utils.parallelism import FSDP2Config

__all__ = ["device_of", "is_unit", "shard_model"]

log = logging.getLogger(__name__)

_COMPUTE = {
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.AMP_FP8: torch.bfloat16,
}
_METHODS = ("eval_forward", "loss", "update_metric", "generate")


def shard_model(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    config: FSDP2Config,
    mesh: DeviceMesh,
    precision: Precision = Precision.FP32,
    seed: int = 0,
    host_group: Any = None,
    ready: bool = False,
) -> None:
    """Divide parameters, gradients and optimizer states among ranks, in place. A collective operation.

    Unit by unit, inner ones first, the weights are moved to the device, made equal to those of rank 0 (or initialised,
    the same on all ranks, if they are on the meta device), and sharded, so that no rank ever holds more than one unit
    besides its shards. Optimizers go on with the new parameters.

    Args:
        model: The model; its children are the units, see `plan_units`.
        optimizers: Its optimizers.
        config: How to shard.
        mesh: The ranks that share the data: one dimension that shards, or before it one that replicates.
        precision: The run's precision.
        seed: Of the initialisation; the same on every rank.
        host_group: A process group for host values; None: the default one.
        ready: Whether the weights are on the device and equal already.

    Raises:
        ValueError: Units share parameters, an optimizer holds parameters of another model, the model is on the meta
            device on rank 0 only, or nothing tells how to initialise it.
    """
    from torch.distributed.fsdp import fully_shard

    units = plan_units(model, config.auto_wrap)
    held = OptimizerParameters(model, optimizers)
    device = device_of(mesh)
    if config.activation_checkpointing or config.activation_cpu_offload:
        lighten_activations(model, units, config.activation_checkpointing, config.activation_cpu_offload)
    arguments = _arguments(config, mesh, precision)
    fresh = set() if ready else uninitialized(model, host_group)
    with reproducibility.seed_context(seed):
        for unit in units:
            if not ready:
                materialize(own_modules(unit.module), device, fresh, init_fn_of(model, unit.name))
            # What the model holds itself stays gathered: its methods may use it after its forward pass.
            reshard = config.reshard_after_forward and unit.module is not model
            fully_shard(unit.module, **{**arguments, "reshard_after_forward": reshard, **unit.options})
        if not (ready or is_unit(model)):  # it may have buffers
            materialize(own_modules(model), device, fresh, init_fn_of(model, ""))
    _gather_in_methods(model)
    held.follow(model)
    plan = ", ".join(unit.name or "the model" for unit in units)
    log.log(logging.WARNING if config.verbose else logging.INFO, "Sharded over %s in units: %s", mesh, plan)


def is_unit(module: torch.nn.Module) -> bool:
    """Whether a module is sharded as one."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _gather_in_methods(model: torch.nn.Module) -> None:
    """Let methods other than `forward` have whole weights, too."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for child in model.children():
        if is_unit(child) and hasattr(child, "generate"):
            register_fsdp_forward_method(child, "generate")
    if is_unit(model):
        for name in _METHODS:
            if hasattr(model, name):
                _gather_in(model, name)


def _gather_in(model: Any, name: str) -> None:
    """Let a method of the model have what is in no inner unit, and leave it gathered for those that follow.

    So they do not gather it, which some ranks might do more often than others.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    owner, key = next(
        (module, key) for module in own_modules(model) for key, p in module._parameters.items() if is_sharded(p)
    )
    plain = getattr(model, name)
    register_fsdp_forward_method(model, name)
    gathering = getattr(model, name)

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not is_sharded(owner._parameters[key]):
            return plain(*args, **kwargs)
        result = gathering(*args, **kwargs)
        model.unshard()  # a pass inside it has freed it
        return result

    setattr(model, name, method)


def _arguments(config: FSDP2Config, mesh: DeviceMesh, precision: Precision) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    return {
        "mesh": mesh,
        "mp_policy": _policy(config.mixed_precision, precision),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }


def _policy(mixed_precision: Any, precision: Precision) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(mixed_precision, str):
        return MixedPrecisionPolicy(**mixed_precision)
    compute = _COMPUTE.get(precision)
    if compute is None or mixed_precision == "FULL":
        return MixedPrecisionPolicy()
    if mixed_precision == "PURE":
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=STR_TO_DTYPE["fp32"])


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where a rank keeps its part: the device of its number on its node."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, dist.get_local_rank())
