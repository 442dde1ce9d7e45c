"""Intel Gaudi."""

from __future__ import annotations

import torch

from composer.devices.device import PlainDevice
from composer.devices.device_tpu import require

__all__ = ["DeviceHPU"]


class DeviceHPU(PlainDevice):
    """An Intel Gaudi card, through Habana's PyTorch bridge.

    Raises:
        ModuleNotFoundError: `habana_frameworks` is not installed.
    """

    dist_backend = "hccl"
    name = "hpu"

    def __init__(self) -> None:
        require("habana_frameworks.torch.core", "DeviceHPU", "pip install habana-torch-plugin")
        self._device = torch.device("hpu")
