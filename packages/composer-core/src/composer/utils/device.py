"""Find the device to train on."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from composer.devices.device import Device

__all__ = ["get_device", "is_hpu_installed", "is_xla_installed"]

_ALIASES = {"cuda": "gpu"}  # torch's name of it
_CLASSES = {
    "cpu": "DeviceCPU",
    "gpu": "DeviceGPU",
    "mps": "DeviceMPS",
    "tpu": "DeviceTPU",
    "neuron": "DeviceNeuron",
    "hpu": "DeviceHPU",
}


def get_device(device: str | Device | None = None) -> Device:
    """The device of a name.

    Args:
        device: "cpu", "gpu" (or "cuda"), "mps", "tpu", "neuron" or "hpu" in any case; a `Device` is returned as it is;
            None is the GPU if CUDA is available, otherwise the CPU.

    Raises:
        ValueError: The name is unknown, or there is no such device here.
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
        hint = " Pass `DeviceGPU(device_id=...)` for one of several." if name.startswith(("cuda:", "gpu:")) else ""
        raise ValueError(f"`device` must be one of {known}, got {device!r}.{hint}")
    made: Device = getattr(devices, _CLASSES[name])()
    return made


def is_xla_installed() -> bool:
    """Whether `torch_xla` is installed. It is not imported."""
    return find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Whether Habana's PyTorch bridge is installed. It is not imported."""
    return find_spec("habana_frameworks") is not None
