"""`DeviceMPS`, under its established import path. `composer.devices.device` defines it."""

from composer.devices.device import DeviceMPS as DeviceMPS

__all__ = ["DeviceMPS"]
