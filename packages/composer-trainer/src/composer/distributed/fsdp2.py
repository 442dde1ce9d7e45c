"""Shard a model with `torch.distributed.fsdp.fully_shard`."""

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
    """Shard parameters, gradients and optimizer states among ranks, in place. A collective operation.

    Unit by unit, inner ones first, the weights are moved to the device, set to those of rank 0 (or initialized, with
    the same values on all ranks, if they are on the meta device), and sharded. So no rank ever stores more than one
    unit in addition to its shards. Optimizers get the new parameters.

    Args:
        model: The model; its children are the units, see `plan_units`.
        optimizers: Its optimizers.
        config: How to shard.
        mesh: The ranks that split the data: one dimension that shards, optionally after one that replicates.
        precision: The run's precision.
        seed: The seed of the initialization; the same on every rank.
        host_group: A process group for host values; None: the default one.
        ready: The weights are on the device and equal on all ranks.

    Raises:
        ValueError: Units share parameters, an optimizer has parameters of another model, the model is on the meta
            device on rank 0 only, or a module has no way to be initialized.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

    units = plan_units(model, config.auto_wrap)
    optimized = OptimizerParameters(model, optimizers)
    device = device_of(mesh)
    if config.activation_checkpointing or config.activation_cpu_offload:
        lighten_activations(model, units, config.activation_checkpointing, config.activation_cpu_offload)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _policy(config.mixed_precision, precision),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    fresh = set() if ready else uninitialized(model, host_group)
    with reproducibility.seed_context(seed):
        for unit in units:
            if not ready:
                materialize(own_modules(unit.module), device, fresh, init_fn_of(model, unit.name))
            # Parameters of the model itself stay gathered: its methods may use them after its forward pass.
            reshard = config.reshard_after_forward and unit.module is not model
            fully_shard(unit.module, **{**arguments, "reshard_after_forward": reshard, **unit.options})
        if not (ready or is_unit(model)):  # it may have buffers
            materialize(own_modules(model), device, fresh, init_fn_of(model, ""))
    _prefetch(model, config)
    # The methods that compute outputs gather the weights, too, not only `forward`.
    for child in model.children():
        if is_unit(child) and hasattr(child, "generate"):
            register_fsdp_forward_method(child, "generate")
    for name in _METHODS if is_unit(model) else ():
        if hasattr(model, name):
            _gather_in(model, name)
    optimized.replace(model)
    plan = ", ".join(unit.name or "the model" for unit in units)
    log.log(logging.WARNING if config.verbose else logging.INFO, "Sharded over %s in units: %s", mesh, plan)


def check_can_shard(config: FSDP2Config, device: str) -> None:
    """Check that a model can be sharded on a device.

    Args:
        config: How to shard.
        device: The name of the device.

    Raises:
        ValueError: `cpu_offload` is on, and the device is the CPU.
        RuntimeError: This version of torch cannot shard on the CPU.
    """
    if config.cpu_offload and device == "cpu":
        raise ValueError(
            "`cpu_offload` must be False on the CPU, got True: everything is in host memory already. Leave it out."
        )
    if device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise RuntimeError(
            f"`parallelism_config` on the CPU needs a later version of torch: the `fully_shard` of "
            f"{torch.__version__} works on GPUs only. Upgrade torch, or leave `parallelism_config` out."
        )


def is_unit(module: torch.nn.Module) -> bool:
    """Return True if a module is a sharded unit."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _prefetch(model: torch.nn.Module, config: FSDP2Config) -> None:
    """Let the units that contain no others gather the weights of those after them, or before them, ahead of time."""
    units: list[Any] = [
        unit
        for unit in model.modules()
        if is_unit(unit) and not any(is_unit(inner) for inner in unit.modules() if inner is not unit)
    ]
    for i, unit in enumerate(units):
        if config.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + config.forward_prefetch_limit])
        if config.backward_prefetch_limit > 1:  # one unit is the default
            unit.set_modules_to_backward_prefetch(units[max(0, i - config.backward_prefetch_limit) : i][::-1])


def _gather_in(model: Any, name: str) -> None:
    """Gather the parameters outside inner units in a method of the model, and leave them gathered.

    Otherwise later methods would gather them, on some ranks more often than on others.
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
        model.unshard()  # a forward pass inside it has freed the parameters
        return result

    setattr(model, name, method)


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
    """Return the device of this rank: the one with its local rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, dist.get_local_rank())
