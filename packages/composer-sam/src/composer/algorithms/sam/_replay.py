"""Drawing the same random numbers again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """What torch's default generators, of the CPU and of some devices, will draw from now on.

    The states are on the host, so no device is waited for.

    Args:
        devices: The devices.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._modules = {device: torch.get_device_module(device) for device in set(devices) if device.type != "cpu"}
        self._cpu = torch.get_rng_state()
        self._states = {device: module.get_rng_state(*_index(device)) for device, module in self._modules.items()}

    def restore(self) -> None:
        """Make the generators draw again what they drew since."""
        torch.set_rng_state(self._cpu)
        for device, module in self._modules.items():
            module.set_rng_state(self._states[device], *_index(device))


def _index(device: torch.device) -> tuple[Any, ...]:
    return () if device.type == "mps" else (device,)  # there is only one such device
