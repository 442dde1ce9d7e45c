"""The peak arithmetic throughput of GPUs, by name and precision."""

from __future__ import annotations

import re

import torch

from composer.core import Precision

__all__ = ["GPU_AVAILABLE_FLOPS", "peak_flops"]

GPU_AVAILABLE_FLOPS: dict[str, dict[str, float]] = {
    "b200": {"fp32": 75e12, "tf32": 1.1e15, "amp_fp16": 2.25e15, "amp_bf16": 2.25e15, "amp_fp8": 4.5e15},
    "h200": {"fp32": 67e12, "tf32": 494.5e12, "amp_fp16": 989.5e12, "amp_bf16": 989.5e12, "amp_fp8": 1.979e15},
    "h100 nvl": {"fp32": 60e12, "tf32": 417.5e12, "amp_fp16": 835.5e12, "amp_bf16": 835.5e12, "amp_fp8": 1.6705e15},
    "h100 pcie": {"fp32": 51e12, "tf32": 378e12, "amp_fp16": 756.5e12, "amp_bf16": 756.5e12, "amp_fp8": 1.513e15},
    "h100": {"fp32": 67e12, "tf32": 494.5e12, "amp_fp16": 989.5e12, "amp_bf16": 989.5e12, "amp_fp8": 1.979e15},
    "a100": {"fp32": 19.5e12, "tf32": 156e12, "amp_fp16": 312e12, "amp_bf16": 312e12},
    "a10g": {"fp32": 31.5e12, "tf32": 35e12, "amp_fp16": 70e12, "amp_bf16": 70e12},
    "a10": {"fp32": 31.2e12, "tf32": 62.5e12, "amp_fp16": 125e12, "amp_bf16": 125e12},
    "l40s": {"fp32": 91.6e12, "tf32": 183e12, "amp_fp16": 362e12, "amp_bf16": 362e12, "amp_fp8": 733e12},
    "l4": {"fp32": 30.3e12, "tf32": 60e12, "amp_fp16": 121e12, "amp_bf16": 121e12, "amp_fp8": 242.5e12},
    "v100-sxm2": {"fp32": 15.7e12, "amp_fp16": 125e12},
    "v100-pcie": {"fp32": 14e12, "amp_fp16": 112e12},
    "t4": {"fp32": 8.1e12, "amp_fp16": 65e12},
}
"""Floating-point operations per second without sparsity, from the vendor's data sheets, by part of the device's name
(in lower case) and precision; "tf32" is fp32 after `torch.set_float32_matmul_precision("high")`."""


def peak_flops(device_name: str, precision: Precision) -> float:
    """The peak of a GPU in operations per second; 0 if it is not known.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
        precision: The numerical precision of the run.
    """
    text = device_name.lower()
    for name, peaks in GPU_AVAILABLE_FLOPS.items():
        # A word may go on with a variant ("a100-sxm4-80gb"), but not with another model's number ("a1000", "l40").
        if all(re.search(rf"\b{re.escape(part)}(?![0-9a-z])", text) for part in name.split()):
            key = precision.value
            if precision is Precision.FP32 and torch.get_float32_matmul_precision() != "highest" and "tf32" in peaks:
                key = "tf32"
            return peaks.get(key, 0.0)
    return 0.0
