"""Find the device to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from composer.core._registry import registered_names
from composer.utils._environment import lookup

if TYPE_CHECKING:
    from composer.devices.device import Device

_ALIASES = {"cuda": "gpu"}  # the name in torch
_CLASSES = {
    "cpu": "DeviceCPU",
    "gpu": "DeviceGPU",
    "mps": "DeviceMPS",
    "tpu": "DeviceTPU",
    "neuron": "DeviceNeuron",
    "hpu": "DeviceHPU",
}


def get_device(device: str | torch.device | Device | None = None) -> Device:
    """Return the device with a given name.

    Args:
        device: "cpu", "gpu" (or "cuda"), "mps", "tpu", "neuron" or "hpu", case-insensitive; "cuda:1" for one of several
            GPUs, in a single process; or a `torch.device`. None and "auto": the GPU if CUDA is available,
            otherwise the CPU. A `Device` is returned unchanged.

    Raises:
        ValueError: The name is unknown, or the machine has no such device.
        ImportError: The device needs a package that is not installed; "tpu", "neuron" and "hpu" need composer-compat.

    Example:
        >>> get_device("CPU").name
        'cpu'
    """
    import composer.devices as devices  # which imports this module

    if isinstance(device, devices.Device):
        return device
    known = ", ".join(map(repr, _CLASSES))
    if not isinstance(device, (str, torch.device, type(None))):
        raise TypeError(f"`device` must be a `Device`, one of {known}, 'auto' or None, got {device!r}.")
    given = "auto" if device is None else str(device).lower()
    if given == "auto":
        given = "gpu" if torch.cuda.is_available() else "cpu"
    name, _, index = given.partition(":")
    name = _ALIASES.get(name, name)
    if name == "gpu" and index.isdecimal():
        if lookup("WORLD_SIZE") > 1:
            raise ValueError(
                f"`device` must be 'gpu' in a run of several processes, each of which uses the GPU of its local rank, "
                f"got {device!r}."
            )
        return devices.DeviceGPU(int(index))
    if name not in _CLASSES or (index and given not in ("cpu:0", "mps:0")) or given.endswith(":"):
        raise ValueError(f"`device` must be one of {known}, 'auto', or a GPU such as 'cuda:0', got {device!r}.")
    try:
        instance: Device = getattr(devices, _CLASSES[name])()
    except AttributeError as error:
        raise ModuleNotFoundError(str(error)) from None  # says to install composer-compat
    return instance


__getattr__ = registered_names(__name__)
