"""`DeviceNeuron`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceNeuron as DeviceNeuron

__all__ = ["DeviceNeuron"]
