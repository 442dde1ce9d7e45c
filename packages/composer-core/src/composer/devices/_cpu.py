from __future__ import annotations

import torch

from composer.devices.device import PlainDevice

__all__ = ["DeviceCPU"]


class DeviceCPU(PlainDevice):
    """The CPU, with gloo between processes."""

    dist_backend = "gloo"
    name = "cpu"
    _device = torch.device("cpu")

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cpu else tensor.cpu()  # asked for every tensor of every batch
