"""`DeviceHPU`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceHPU as DeviceHPU

__all__ = ["DeviceHPU"]
