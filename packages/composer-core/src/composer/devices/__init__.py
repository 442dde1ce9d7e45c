"""Devices to train on: CPU, CUDA GPU, Apple MPS, TPU, AWS Neuron and Intel Gaudi."""

from composer.devices.device import Device as Device
from composer.devices.device import DeviceCPU as DeviceCPU
from composer.devices.device import DeviceGPU as DeviceGPU
from composer.devices.device import DeviceHPU as DeviceHPU
from composer.devices.device import DeviceMPS as DeviceMPS
from composer.devices.device import DeviceNeuron as DeviceNeuron
from composer.devices.device import DeviceTPU as DeviceTPU

__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceHPU", "DeviceMPS", "DeviceNeuron", "DeviceTPU"]
