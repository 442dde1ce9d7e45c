from __future__ import annotations

import torch

from composer.devices.device import PlainDevice

__all__ = ["DeviceMPS"]


class DeviceMPS(PlainDevice):
    """The GPU of an Apple computer; one process only.

    Raises:
        ValueError: MPS is not available.
    """

    dist_backend = ""
    name = "mps"

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            raise ValueError("`DeviceMPS` needs an Apple GPU, and MPS is not available here. Use `device='cpu'`.")
        self._device = torch.device("mps")
