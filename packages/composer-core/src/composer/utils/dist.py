"""Ranks and collectives of a distributed run. All functions also work in a single process.

Importing this module initializes nothing. The ranks come from the environment variables that are listed in
`composer.utils._environment`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from composer.core._registry import registered_names
from composer.utils._environment import DEFAULTS, from_environment, lookup
from composer.utils._environment import MissingEnvironmentError as MissingEnvironmentError
from composer.utils._environment import is_available as is_available
from composer.utils._environment import is_initialized as is_initialized
from composer.utils.device import get_device

if TYPE_CHECKING:
    from collections.abc import Sized

    from torch.distributed import ProcessGroup

    from composer.devices.device import Device

T = TypeVar("T")

_REDUCE_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_REGISTERS_BACKEND = {"xla": "torch_xla.distributed.xla_backend", "hccl": "habana_frameworks.torch.distributed.hccl"}
# Before 2.8 (pytorch/pytorch#154976) the destructor of a group holds the GIL while it waits for its threads, and one of
# these may wait for the GIL to free a tensor of the last collective. So the groups are kept until the process ends.
_CAN_FREE_GROUPS = torch.__version__ >= "2.8"  # compares as versions, not as strings
_destroyed_groups: set[ProcessGroup | None] = set()


# ---- ranks and world sizes


def get_world_size() -> int:
    """Return the number of processes.

    Raises:
        RuntimeError: The environment contradicts the process group.
    """
    return lookup("WORLD_SIZE", torch.distributed.get_world_size if is_initialized() else None)


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return the index of this process among all processes, or within `group`.

    Raises:
        RuntimeError: The environment contradicts the process group.
    """
    if group is not None and is_initialized():
        return torch.distributed.get_rank(group)
    return lookup("RANK", torch.distributed.get_rank if is_initialized() else None)


def get_local_world_size() -> int:
    """Return the number of processes on this node.

    Raises:
        MissingEnvironmentError: The process group is initialized, but `LOCAL_WORLD_SIZE` is not set.
    """
    return lookup("LOCAL_WORLD_SIZE")


def get_local_rank() -> int:
    """Return the index of this process on its node.

    Raises:
        MissingEnvironmentError: The process group is initialized, but `LOCAL_RANK` is not set.
    """
    return lookup("LOCAL_RANK")


def get_node_rank() -> int:
    """Return the index of this node.

    Raises:
        MissingEnvironmentError: The process group is initialized, but `NODE_RANK` is not set.
    """
    return lookup("NODE_RANK")


# ---- collectives


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every process of the group calls this function."""
    if not _is_single_process("barrier"):
        # Without a device, NCCL guesses it and warns.
        on_gpu = torch.distributed.get_backend(group) == "nccl"
        torch.distributed.barrier(group=group, device_ids=[torch.cuda.current_device()] if on_gpu else None)


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None) -> None:
    """Combine a tensor over all processes, in place.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks, on a device that the backend supports.
        reduce_operation: "SUM", "AVG" (not with gloo), "PRODUCT", "MIN", "MAX", "BAND", "BOR" or "BXOR".
        group: The processes; None: all.

    Raises:
        ValueError: `reduce_operation` is unknown.
    """
    if reduce_operation.upper() not in _REDUCE_OPERATIONS:
        known = ", ".join(_REDUCE_OPERATIONS)
        raise ValueError(f"`reduce_operation` must be one of {known}, got {reduce_operation!r}.")
    if not _is_single_process("all_reduce"):
        operation = getattr(torch.distributed.ReduceOp, reduce_operation.upper())
        torch.distributed.all_reduce(tensor, op=operation, group=group)


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Overwrite `tensor` on all ranks with that of global rank `src`."""
    if not _is_single_process("broadcast"):
        torch.distributed.broadcast(tensor, src, group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Overwrite the elements of `object_list` on all ranks with those of global rank `src`, using pickle."""
    if not _is_single_process("broadcast_object_list"):
        torch.distributed.broadcast_object_list(object_list, src, group)


def all_gather(tensor: torch.Tensor, group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the tensors of all processes, by rank. Not differentiable.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        group: The processes; None: all.
    """
    if _is_single_process("all_gather"):
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, tensor, group=group)
    return gathered


def all_gather_object(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the objects of all processes, by rank, using pickle."""
    if _is_single_process("all_gather_object"):
        return [obj]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, obj, group=group)
    return gathered


def _is_single_process(operation: str) -> bool:
    """Return True if there is only one process and no process group.

    Raises:
        RuntimeError: There are several processes, but no process group.
    """
    if is_initialized():
        return False
    world_size = get_world_size()
    if world_size == 1:
        return True
    raise RuntimeError(
        f"`{operation}` needs all {world_size} processes, but the distributed package is not available or has not been "
        f"initialized. Call `composer.utils.dist.initialize_dist(device)` first."
    )


# ---- process groups


def initialize_dist(device: Device | str | None = None, timeout: float = 300.0) -> None:
    """Initialize the default process group from the environment, unless it exists already.

    A single process gets a group without a network, and the environment variables that a launcher would set.

    Args:
        device: The device, which determines the backend: gloo for the CPU, NCCL for GPUs. None: the GPU if there is
            one, otherwise the CPU.
        timeout: The timeout of collectives in seconds.

    Raises:
        RuntimeError: The group exists with another backend; or there are several processes and the device has no
            backend, or torch was built without `torch.distributed`.
    """
    device = get_device(device)
    backend = device.dist_backend
    if is_initialized():
        config = torch.distributed.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
        if backend and backend not in [part.rpartition(":")[2] for part in config.split(",")]:
            raise RuntimeError(
                f"The device {device.name!r} needs the backend {backend!r}, but torch.distributed is already "
                f"initialized with {config!r}. Initialize it with that backend, or leave it to the Trainer."
            )
        return
    if not (backend and is_available()):
        if get_world_size() > 1:
            raise RuntimeError(
                f"{get_world_size()} processes were started, but the device {device.name!r} has no backend through "
                f"which they could communicate. Start a single process."
            )
        return
    if backend in _REGISTERS_BACKEND:
        import_module(_REGISTERS_BACKEND[backend])
    init, limit = torch.distributed.init_process_group, timedelta(seconds=timeout)
    if backend == "xla":
        init(backend, init_method="xla://", timeout=limit)
    elif all(from_environment(name) in (None, default) for name, default in DEFAULTS.items()):
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

        for name, default in DEFAULTS.items():
            os.environ[name] = str(default)
        init(backend, store=HashStore(), world_size=1, rank=0, timeout=limit)
    else:
        init(backend, timeout=limit)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy a process group. All of its processes must call this.

    `torch.distributed.destroy_process_group` sometimes hangs on torch 2.6 and 2.7. This function avoids that: there,
    threads and connections of all groups stay until the process ends.

    Args:
        group: The group; None: the default group and all others.
    """
    if not _CAN_FREE_GROUPS:
        _destroyed_groups.update(torch.distributed.distributed_c10d._world.pg_map)
    torch.distributed.destroy_process_group(group)


def get_sampler(
    dataset: Sized,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[Any]:
    """Return a sampler that gives each process its shard of a dataset.

    Args:
        dataset: The dataset; only its length is used.
        drop_last: Drop the tail instead of repeating samples, so that all shards have the same length.
        shuffle: Shuffle, in another order every epoch.
        num_replicas: The number of shards; None: the world size.
        rank: The index of the shard; None: the global rank of this process.
        seed: The seed of the shuffling; must be the same in all processes.
    """
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]  # it only ever takes its length
        drop_last=drop_last,
        shuffle=shuffle,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        seed=seed,
    )


__getattr__ = registered_names(__name__)
