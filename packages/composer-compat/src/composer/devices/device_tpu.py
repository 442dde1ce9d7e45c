"""TPUs, and other devices of `torch_xla`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from composer.devices.device import PlainDevice

__all__ = ["DeviceTPU"]


class DeviceTPU(PlainDevice):
    """A TPU, through `torch_xla`.

    Raises:
        ModuleNotFoundError: `torch_xla` is not installed.
    """

    dist_backend = "xla"
    name = "tpu"

    def __init__(self) -> None:
        self._device = xla_device("DeviceTPU", "pip install torch_xla[tpu]")


def xla_device(owner: str, command: str) -> torch.device:
    """Return the device of `torch_xla`; `require` has the arguments."""
    device: torch.device = require("torch_xla.core.xla_model", owner, command).xla_device()
    return device


def require(module: str, owner: str, command: str) -> Any:
    """Import a module of a vendor.

    Args:
        module: Its name.
        owner: The class that needs it, for the message.
        command: The command that installs it.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:  # it is installed, but something it needs is not
            raise
        raise ModuleNotFoundError(
            f"`{owner}` needs the package `{package}`, which is not installed. Run `{command}`.", name=package
        ) from None


def is_xla_installed() -> bool:
    """Return True if `torch_xla` is installed, without importing it."""
    return find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Return True if the PyTorch bridge of Habana is installed, without importing it."""
    return find_spec("habana_frameworks") is not None
