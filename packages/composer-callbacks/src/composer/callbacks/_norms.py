"""L2 norms of tensors, whole or sharded, that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer.utils import dist, local_part

__all__ = ["joint_norm", "local_norms", "whole_norms"]


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


def whole_norms(norms: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The norms of whole tensors, from the norms of parts.

    Args:
        norms: By key; of this rank's part where the owner is sharded.
        owners: The parameter that each key is about. Sharded ones must be in the same order on all ranks.
    """
    shared: dict[tuple[Any, tuple[int, ...]], list[str]] = {}
    for key in norms:
        places = getattr(owners[key], "placements", None)
        dims = () if places is None else tuple(i for i, place in enumerate(places) if not place.is_replicate())
        if dims:
            owner: Any = owners[key]
            shared.setdefault((owner.device_mesh, dims), []).append(key)
    whole = dict(norms)
    for (mesh, dims), keys in shared.items():
        total = torch.stack([norms[key].float() for key in keys]).square()
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        whole.update(zip(keys, total.sqrt().unbind(), strict=True))
    return whole


def joint_norm(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of several tensors together, from the norm of each; they may be on several devices.

    Args:
        norms: The norms; none are 0.
        device: Of the result.
    """
    if not norms:
        return torch.zeros((), device=device)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float32, non_blocking=True) for norm in norms]
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack([*norms]))
    return joint.to(device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    part = local_part(tensor.detach())
    return part.coalesce().values() if part.is_sparse else part


_EMPTY = torch.empty(0)
