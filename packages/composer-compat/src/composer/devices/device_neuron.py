"""AWS Trainium and Inferentia."""

from __future__ import annotations

from composer.devices.device import PlainDevice
from composer.devices.device_tpu import xla_device

__all__ = ["DeviceNeuron"]


class DeviceNeuron(PlainDevice):
    """An AWS Trainium or Inferentia core, through `torch_xla` of `torch-neuronx`.

    Raises:
        ModuleNotFoundError: `torch_xla` is not installed.
    """

    dist_backend = "xla"
    name = "neuron"

    def __init__(self) -> None:
        self._device = xla_device("DeviceNeuron", "pip install torch-neuronx")
