"""Torch's name of a device, however it was given."""

from __future__ import annotations

from typing import TypeAlias

import torch

from composer.devices import Device
from composer.utils import dist

__all__ = ["AnyDevice", "as_torch"]

AnyDevice: TypeAlias = Device | torch.device | str


def as_torch(device: AnyDevice) -> torch.device:
    """Torch's name of a device.

    Args:
        device: A `Device`, a torch device, or the name of one. "gpu" and "cuda" are the GPU with this process's local
            rank, as the Trainer takes it.

    Raises:
        ValueError: It is a GPU, and CUDA is not available.
    """
    if isinstance(device, Device):
        return device.tensor_to_device(torch.empty(0)).device
    found = torch.device("cuda" if isinstance(device, str) and device.lower() == "gpu" else device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"`device` must be one that is here, got {device!r} without CUDA. Use `device='cpu'`.")
        if str(found) == "cuda":
            return torch.device("cuda", dist.get_local_rank())
    return found
