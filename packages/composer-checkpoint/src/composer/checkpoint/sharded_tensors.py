"""Convert between whole and sharded tensors (`DTensor`) in nested structures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

Path = tuple[Any, ...]
"""The keys and indices that lead to a value in a nested structure."""


def map_items(mapping: dict[Any, Any], map_fn: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Apply a function to each value of a dict; return a dict of the same class, such as `Counter`.

    Args:
        mapping: The dict; not modified.
        map_fn: A function of key and value that returns the new value.
    """
    if type(mapping) is dict:
        return {key: map_fn(key, value) for key, value in mapping.items()}
    copied = copy.copy(mapping)  # the constructor may take other arguments than pairs
    for key, value in mapping.items():
        copied[key] = map_fn(key, value)
    return copied


def map_nested(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Copy a nested structure of dicts, lists and tuples with other leaves; always in the same order.

    Args:
        value: The structure, which is not changed. Subclasses of list and tuple are leaves.
        change: Called with the path and the value of each leaf; returns the new value.
        path: The path of `value`.
    """
    if isinstance(value, dict):
        return map_items(value, lambda key, item: map_nested(item, change, (*path, key)))
    if type(value) in (list, tuple):
        return type(value)(map_nested(item, change, (*path, index)) for index, item in enumerate(value))
    return change(path, value)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copy a nested structure with other tensors."""
    return map_nested(value, lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def parameter_of(path: Path, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter that a value belongs to: the last one that its path names; None if it names none."""
    return next((parameters[key] for key in reversed(path) if type(key) is str and key in parameters), None)


def is_sharded(value: Any) -> bool:
    """Return True for a tensor that this process holds a part of."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local") and hasattr(value, "placements")


def shard_like(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks have, sharded as another of the same shape. No communication.

    Args:
        whole: The tensor.
        like: The tensor whose division is copied; if that is whole, `whole` is returned.
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = like.to_local()
    _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    index = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    part = torch.empty_like(local, dtype=whole.dtype)
    part.copy_(whole.detach()[index])
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gather_tensors(value: Any) -> Any:
    """Copy a nested structure with whole tensors, on the host, for sharded ones. A collective operation."""

    def whole(tensor: Any) -> Any:
        return tensor.detach().full_tensor().cpu() if is_sharded(tensor) else tensor

    return map_tensors(value, whole)


def shard_tensors(value: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Shard the tensors of a nested structure that belong to a sharded parameter like it. No communication.

    What belongs to a parameter is found under its name and has its shape: the parameter itself, its momentum, its
    average, or the like.

    Args:
        value: The structure, with whole tensors, equal on all ranks.
        parameters: The parameters by name.
    """

    def shard(path: Path, leaf: Any) -> Any:
        like = parameter_of(path, parameters)
        fits = isinstance(leaf, torch.Tensor) and like is not None and leaf.shape == like.shape
        return shard_like(leaf, like) if fits else leaf

    return map_nested(value, shard)
