"""Devices whose PyTorch support comes from a package of its own, imported when a device is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from composer.devices.device import PlainDevice

__all__ = ["DeviceHPU", "DeviceNeuron", "DeviceTPU"]


class DeviceTPU(PlainDevice):
    """A TPU, through `torch_xla`.

    Raises:
        ModuleNotFoundError: `torch_xla` is not installed.
    """

    dist_backend = "xla"
    name = "tpu"

    def __init__(self) -> None:
        self._device = _xla_device("DeviceTPU", "pip install torch_xla[tpu]")


class DeviceNeuron(PlainDevice):
    """An AWS Trainium or Inferentia core, through `torch_xla` of `torch-neuronx`.

    Raises:
        ModuleNotFoundError: `torch_xla` is not installed.
    """

    dist_backend = "xla"
    name = "neuron"

    def __init__(self) -> None:
        self._device = _xla_device("DeviceNeuron", "pip install torch-neuronx")


class DeviceHPU(PlainDevice):
    """An Intel Gaudi card, through Habana's PyTorch bridge.

    Raises:
        ModuleNotFoundError: `habana_frameworks` is not installed.
    """

    dist_backend = "hccl"
    name = "hpu"

    def __init__(self) -> None:
        _require("habana_frameworks.torch.core", "DeviceHPU", "pip install habana-torch-plugin")
        self._device = torch.device("hpu")


def _xla_device(owner: str, command: str) -> torch.device:
    xla_model = _require("torch_xla.core.xla_model", owner, command)
    device: torch.device = xla_model.xla_device()
    return device


def _require(module: str, owner: str, command: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:  # it is installed, but something it needs is not
            raise
        raise ModuleNotFoundError(
            f"`{owner}` needs the package `{package}`, which is not installed. Run `{command}`.", name=package
        ) from None
