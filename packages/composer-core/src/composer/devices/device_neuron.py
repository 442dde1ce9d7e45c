"""`DeviceNeuron`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceNeuron as DeviceNeuron

__all__ = ["DeviceNeuron"]
