"""Between whole tensors and sharded ones (`DTensor`), in nested structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer.utils.iter_helpers import map_items

__all__ = ["gathered", "is_sharded", "map_tensors", "shard_like", "sharded_as"]


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which this process holds a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local") and hasattr(value, "placements")


def shard_like(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have, divided as another of the same shape. Exchanges nothing.

    Args:
        whole: The tensor.
        like: What it is to be like; if that is whole, `whole` is returned.
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import DTensor

    local = like.to_local()
    index = tuple(slice(start, start + size) for start, size in zip(_offset(like), local.shape, strict=True))
    part = torch.empty_like(local, dtype=whole.dtype)
    part.copy_(whole.detach()[index])
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _offset(like: Any) -> tuple[int, ...]:
    """Where this rank's part begins in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    offset: tuple[int, ...] = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)[1]
    return offset


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of a nested structure with other tensors; always in the same order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return map_items(value, lambda _, item: map_tensors(item, change))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def gathered(value: Any) -> Any:
    """A nested structure with whole tensors, on the host, instead of sharded ones. A collective operation."""

    def whole(tensor: Any) -> Any:
        return tensor.detach().full_tensor().cpu() if is_sharded(tensor) else tensor

    return map_tensors(value, whole)


def sharded_as(value: Any, parameters: Mapping[str, torch.Tensor], like: torch.Tensor | None = None) -> Any:
    """A nested structure whose tensors that belong to a sharded parameter are sharded like it. Exchanges nothing.

    What belongs to a parameter is found under its name and has its shape: the parameter itself, its momentum, its
    average, or the like.

    Args:
        value: The structure, with whole tensors, equal on all ranks.
        parameters: The parameters by name.
        like: What the structure as a whole belongs to.
    """
    if isinstance(value, torch.Tensor):
        return shard_like(value, like) if like is not None and value.shape == like.shape else value
    if isinstance(value, dict):
        return map_items(value, lambda key, item: sharded_as(item, parameters, parameters.get(key, like)))
    if type(value) in (list, tuple):
        return type(value)(sharded_as(item, parameters, like) for item in value)
    return value
