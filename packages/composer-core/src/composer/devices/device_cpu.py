"""`DeviceCPU`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceCPU as DeviceCPU

__all__ = ["DeviceCPU"]
