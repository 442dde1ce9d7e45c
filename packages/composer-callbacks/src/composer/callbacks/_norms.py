"""L2 norms of tensors, whole or sharded, that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer.utils import dist, local_part

__all__ = ["local_norms", "root_of_sums", "sums_of_squares"]


def local_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor, or of this rank's part of it, in at least 32 bits.

    Args:
        tensors: Of any devices and floating dtypes; may be sharded or sparse.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    parts = [_plain(tensor) for tensor in tensors]
    for i, part in enumerate(parts):
        alike.setdefault((part.device, part.dtype), []).append(i)
    norms: list[torch.Tensor] = [_EMPTY] * len(parts)
    for (_, dtype), places in alike.items():
        wide = None if dtype in (torch.float32, torch.float64) else torch.float32
        for i, norm in zip(places, torch._foreach_norm([parts[i] for i in places], 2, dtype=wide), strict=True):
            norms[i] = norm
    return norms


def sums_of_squares(norms: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The squared norms of whole tensors, from the norms of parts.

    Args:
        norms: By key; of this rank's part where the owner is sharded.
        owners: The parameter that each key is about. Sharded ones must be in the same order on all ranks.
    """
    squares = {key: norm.double() if norm.dtype is torch.float64 else norm.float() for key, norm in norms.items()}
    squares = {key: norm.square() for key, norm in squares.items()}
    shared: dict[tuple[Any, tuple[int, ...]], list[str]] = {}
    for key in squares:
        owner: Any = owners[key]
        dims = tuple(i for i, place in enumerate(getattr(owner, "placements", ())) if not place.is_replicate())
        if dims:
            shared.setdefault((owner.device_mesh, dims), []).append(key)
    for (mesh, dims), keys in shared.items():
        total = torch.stack([squares[key].float() for key in keys])
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        squares.update(zip(keys, total.unbind(), strict=True))
    return squares


def root_of_sums(squares: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The root of the sum of numbers that may be on several devices.

    Args:
        squares: The numbers; none are 0.
        device: Of the result.
    """
    if not squares:
        return torch.zeros((), device=device)
    return torch.stack([square.to(device, non_blocking=True) for square in squares]).sum().sqrt()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    part = local_part(tensor.detach())
    return part.coalesce().values() if part.is_sparse else part


_EMPTY = torch.empty(0)
