"""`DeviceMPS`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceMPS as DeviceMPS

__all__ = ["DeviceMPS"]
