"""`DeviceTPU`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceTPU as DeviceTPU

__all__ = ["DeviceTPU"]
