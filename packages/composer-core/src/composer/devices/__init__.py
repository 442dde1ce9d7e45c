"""Devices to train on: CPU, CUDA GPU and Apple MPS; TPU, AWS Neuron and Intel Gaudi belong to composer-compat."""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

_OWN = {"device": "Device DeviceCPU DeviceGPU DeviceMPS"}
__getattr__, __dir__ = lazy_namespace("composer.devices", globals(), _OWN)
