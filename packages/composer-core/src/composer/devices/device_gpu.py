"""`DeviceGPU`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceGPU as DeviceGPU

__all__ = ["DeviceGPU"]
