"""Prepare a model for several processes, in a loop of your own. The Trainer does this itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer.core import Precision
from composer.devices import Device
from composer.distributed.ddp import DDPSyncStrategy as DDPSyncStrategy
from composer.distributed.ddp import ddp_sync_context as ddp_sync_context
from composer.distributed.ddp import prepare_ddp_module as prepare_ddp_module
from composer.distributed.fsdp2 import check_can_shard, shard_model
from composer.distributed.mesh import SHARD, TENSOR, make_mesh
from composer.distributed.tensor_parallel import divide_layers
from composer.utils import dist, ensure_tuple, get_device
from composer.utils.parallelism import FSDP2Config, ParallelismConfig, TPConfig

__all__ = ["DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module", "prepare_fsdp_module", "prepare_tp_module"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def prepare_fsdp_module(
    model: torch.nn.Module,
    optimizers: Optimizers,
    fsdp_config: FSDP2Config | Mapping[str, Any],
    precision: Precision | str | None = None,
    device: Device | str | None = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
) -> tuple[list[Any], dict[str, Any]]:
    """Shard a model and its optimizers among ranks with `fully_shard`, in place. A collective operation.

    Args:
        model: The model, such as a `ComposerModel`. Its children, and the modules that they select with `fsdp_wrap_fn`,
            `_fsdp_wrap` or `_no_split_modules`, are gathered and freed as units. On rank 0 it has weights, on other
            ranks it may be on the meta device; on the meta device everywhere, it is initialized.
        optimizers: Its optimizers, which get the new parameters.
        fsdp_config: The configuration, or a dict of the arguments of `FSDPConfig`.
        precision: The precision of the run, in which weights are gathered; None: their own.
        device: The device of this rank; None: a GPU if there is one, else the CPU.
        auto_microbatching: Must be False: the search for a microbatch size over ranks is part of the Trainer.
        te_rng_seed: The seed with which modules on the meta device are initialized.

    Returns:
        `([], {})`, in place of the hooks that the first version of FSDP returned.

    Raises:
        RuntimeError: There is no process group, or this version of torch cannot shard on the device.
        ValueError: An argument is not supported, units share parameters, an optimizer has parameters of another model,
            or a module has no way to be initialized.
    """
    if auto_microbatching:
        raise ValueError(
            "`auto_microbatching` must be False, got True. `Trainer(device_train_microbatch_size='auto', "
            "parallelism_config={'fsdp': ...})` searches for a size, over all ranks."
        )
    shard(model, optimizers, fsdp_config, precision, device, te_rng_seed)
    return [], {}


def shard(
    model: torch.nn.Module,
    optimizers: Optimizers,
    fsdp_config: FSDP2Config | Mapping[str, Any],
    precision: Precision | str | None,
    device: Device | str | None,
    seed: int,
) -> None:
    """Shard a model and its optimizers; see `prepare_fsdp_module`."""
    config = ParallelismConfig(fsdp=fsdp_config).fsdp
    assert isinstance(config, FSDP2Config), "`ParallelismConfig` converts dicts"
    found = _device(device, "Sharding a model")
    check_can_shard(config, found.name)
    divided = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if divided and config.device_mesh is None:
        raise ValueError(
            "`fsdp_config` must have a `device_mesh` if layers are split by `prepare_tp_module`: give both one "
            f"dimension of the same mesh, `FSDP2Config(device_mesh=mesh['{SHARD}'])` and "
            f"`TPConfig(device_mesh=mesh['{TENSOR}'], ...)`."
        )
    mesh = make_mesh(config, 1, found.torch_type) if config.device_mesh is None else config.device_mesh
    wanted = Precision.FP32 if precision is None else Precision(precision)
    shard_model(model, ensure_tuple(optimizers), config, mesh, wanted, seed, ready=divided)


def prepare_tp_module(model: torch.nn.Module, optimizers: Optimizers, tp_config: TPConfig | Mapping[str, Any]) -> None:
    """Split layers of a model among ranks with `parallelize_module`, in place. A collective operation.

    Call it before `prepare_fsdp_module`, with the model on the device of the rank and equal weights on all ranks. The
    ranks of one tensor-parallel group must train on the same batches.

    Args:
        model: The model.
        optimizers: Its optimizers, which get the new parameters.
        tp_config: The configuration, or a dict of its arguments. Without a `device_mesh`, neighboring ranks share
            layers.

    Raises:
        RuntimeError: There is no process group.
        ValueError: The layer plan has a name that is not a module, the degree does not divide the number of ranks, or
            an optimizer has parameters of another model.
        TypeError: `tp_config` is not a configuration.
    """
    config = TPConfig(**tp_config) if isinstance(tp_config, Mapping) else tp_config
    if not isinstance(config, TPConfig):
        raise TypeError(f"`tp_config` must be a `TPConfig` or a dict of its arguments, got {tp_config!r}.")
    first = next(model.parameters(), None)
    device = _device(None if first is None else first.device.type, "Splitting layers")
    mesh = config.device_mesh
    if mesh is None:
        if config.tensor_parallel_degree == 1:
            return
        mesh = make_mesh(FSDP2Config(), config.tensor_parallel_degree, device.torch_type)[TENSOR]
    divide_layers(model, ensure_tuple(optimizers), config.layer_plan or {}, mesh)


def _device(device: Device | str | None, what: str) -> Device:
    """Return the device of this rank.

    Raises:
        RuntimeError: There is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            f"{what} needs a process group, but the distributed package is not available or has not been initialized. "
            f"Call `composer.utils.dist.initialize_dist(device)` first."
        )
    return get_device({"cuda": "gpu"}.get(device, device) if isinstance(device, str) else device)
