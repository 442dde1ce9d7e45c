"""`DeviceGPU`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceGPU as DeviceGPU

__all__ = ["DeviceGPU"]
