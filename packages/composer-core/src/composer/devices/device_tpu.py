"""`DeviceTPU`, under the import path of MosaicML's Composer. `composer.devices.device` defines it."""

from composer.devices.device import DeviceTPU as DeviceTPU

__all__ = ["DeviceTPU"]
