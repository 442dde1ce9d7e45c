"""Where a run trains: the CPU, a CUDA GPU, Apple's MPS, TPU, AWS Neuron or Gaudi."""

from composer.devices._accelerators import DeviceHPU as DeviceHPU
from composer.devices._accelerators import DeviceNeuron as DeviceNeuron
from composer.devices._accelerators import DeviceTPU as DeviceTPU
from composer.devices._cpu import DeviceCPU as DeviceCPU
from composer.devices._gpu import DeviceGPU as DeviceGPU
from composer.devices._mps import DeviceMPS as DeviceMPS
from composer.devices.device import Device as Device

__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceHPU", "DeviceMPS", "DeviceNeuron", "DeviceTPU"]
