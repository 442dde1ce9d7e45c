"""Find the device to train on."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from composer.devices.device import Device

__all__ = ["get_device", "is_hpu_installed", "is_xla_installed"]

_ALIASES = {"cuda": "gpu"}  # the name in torch
_CLASSES = {
    "cpu": "DeviceCPU",
    "gpu": "DeviceGPU",
    "mps": "DeviceMPS",
    "tpu": "DeviceTPU",
    "neuron": "DeviceNeuron",
    "hpu": "DeviceHPU",
}


def get_device(device: str | Device | None = None) -> Device:
    """Return the device of a name.

    Args:
        device: "cpu", "gpu" (or "cuda"), "mps", "tpu", "neuron" or "hpu", case-insensitive. None is the GPU if CUDA is
            available, otherwise the CPU. A `Device` is returned unchanged.

    Raises:
        ValueError: The name is unknown, or the machine has no such device.
        ModuleNotFoundError: The device needs a package that is not installed.

    Example:
        >>> get_device("CPU").name
        'cpu'
    """
    from composer.devices import device as devices  # which imports this package

    if isinstance(device, devices.Device):
        return device
    if device is None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
    known = ", ".join(map(repr, _CLASSES))
    if not isinstance(device, str):
        raise TypeError(f"`device` must be a `Device`, one of {known}, or None, got {device!r}.")
    name = _ALIASES.get(device.lower(), device.lower())
    if name not in _CLASSES:
        hint = " Pass `DeviceGPU(device_id=...)` to select a GPU." if name.startswith(("cuda:", "gpu:")) else ""
        raise ValueError(f"`device` must be one of {known}, got {device!r}.{hint}")
    instance: Device = getattr(devices, _CLASSES[name])()
    return instance


def is_xla_installed() -> bool:
    """Return True if `torch_xla` is installed, without importing it."""
    return find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Return True if the PyTorch bridge of Habana is installed, without importing it."""
    return find_spec("habana_frameworks") is not None
