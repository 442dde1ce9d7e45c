"""`DeviceHPU`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceHPU as DeviceHPU

__all__ = ["DeviceHPU"]
