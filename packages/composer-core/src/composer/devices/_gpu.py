from __future__ import annotations

import warnings

import torch

from composer.devices.device import Device, T_nnModule
from composer.utils import dist

__all__ = ["DeviceGPU"]


class DeviceGPU(Device):
    """One CUDA (or ROCm) GPU, with NCCL between processes.

    Makes the GPU the current one and sets the process-wide TF32 switches.

    Args:
        device_id: The index of the GPU; None takes the one with this process's local rank.
        allow_tf32: Whether matrix products and convolutions of float32 may round their inputs to TF32 (10 bits of
            mantissa), which is several times faster from Ampere on.

    Raises:
        ValueError: CUDA is not available, or has no such GPU.
    """

    dist_backend = "nccl"
    name = "gpu"

    def __init__(self, device_id: int | None = None, *, allow_tf32: bool = True) -> None:
        if not torch.cuda.is_available():
            raise ValueError("`DeviceGPU` needs a GPU, and CUDA is not available here. Use `device='cpu'`.")
        if device_id is None:
            device_id = dist.get_local_rank()
        count = torch.cuda.device_count()
        if not 0 <= device_id < count:
            raise ValueError(f"`device_id` must be below the number of visible GPUs, {count}, got {device_id!r}.")
        self._device = torch.device("cuda", device_id)
        torch.cuda.set_device(self._device)
        _set_tf32(allow_tf32)

    def module_to_device(self, module: T_nnModule) -> T_nnModule:
        return module.to(self._device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


def _set_tf32(allow: bool) -> None:
    # Of torch's two interfaces, only the older one keeps both of its records in step: after
    # `matmul.fp32_precision = "tf32"`, `torch.get_float32_matmul_precision`, which `torch.compile` calls, raises.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow
