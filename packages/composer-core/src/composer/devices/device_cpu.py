"""`DeviceCPU`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceCPU as DeviceCPU

__all__ = ["DeviceCPU"]
