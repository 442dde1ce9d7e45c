"""Check that all ranks have built the same model."""

from __future__ import annotations

from typing import Any

import torch

from composer.utils import dist

__all__ = ["check_same_structure"]


def check_same_structure(model: torch.nn.Module, rank: int, host_group: Any = None) -> None:
    """Compare names, shapes and dtypes over ranks. A collective operation.

    Raises:
        RuntimeError: The structure of the model differs between ranks.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    for other_rank, other in enumerate(dist.all_gather_object(local, host_group)):
        differing = sorted(name for name in {*local, *other} if local.get(name) != other.get(name))
        if differing:
            raise RuntimeError(
                f"`model` must have the same structure on every rank, but it differs between rank {rank} and rank "
                f"{other_rank} in {', '.join(differing[:5])}. Build it from the same arguments everywhere."
            )
