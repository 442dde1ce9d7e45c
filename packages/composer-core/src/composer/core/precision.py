"""The numerical precision of forward passes and losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from composer.core._registry import load
from composer.utils.string_enum import StringEnum

if TYPE_CHECKING:
    from composer.core.state import State
    from composer.devices.device import Device


class Precision(StringEnum):
    """The numerical precision of forward passes and losses.

    FP32 computes in the dtype of the parameters. AMP_FP16 and AMP_BF16 use `torch.autocast`. AMP_FP8 uses
    TransformerEngine, for modules that are built from its layers.

    The names of other trainers are accepted too: 32, "32-true" and "no"; 16, "16-mixed" and "fp16"; "bf16-mixed" and
    "bf16"; "fp8"; and `torch.float32`, `torch.float16` and `torch.bfloat16`.
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        is_name = isinstance(value, (str, int, torch.dtype)) and not isinstance(value, bool)
        name = str(value).lower().removeprefix("torch.")
        if is_name and name in _ALIASES:
            return cls.__members__[_ALIASES[name]]
        return super()._missing_(name if is_name else value)


# The names in PyTorch, Lightning, Accelerate and transformers.
_ALIASES = {
    **dict.fromkeys(("32", "32-true", "float32", "full", "no"), "FP32"),
    **dict.fromkeys(("16", "16-mixed", "fp16", "float16", "half", "fp16-mixed"), "AMP_FP16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16"), "AMP_BF16"),
    "fp8": "AMP_FP8",
}

_AMP_DTYPES = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}
_UNCHANGED = contextlib.nullcontext()  # stateless, so that one object serves every step


def get_precision_context(
    precision: str | Precision,
    precision_config: dict[str, Any] | None = None,
    fp8_autocast_enabled: bool = True,
    *,
    device_type: str | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager in which forward passes and losses have a given precision.

    FP32 disables an autocast of `device_type` that is active when this function is called; without one, the context
    does nothing.

    Args:
        precision: A `Precision` or its name.
        precision_config: Arguments of TransformerEngine's `DelayedScaling` recipe, for AMP_FP8; None: the hybrid
            format with an amax history of 16 steps.
        fp8_autocast_enabled: True if TransformerEngine modules compute in FP8; False in evaluation. AMP_FP8 only.
        device_type: The torch device type whose operations are affected; None: "cuda" if CUDA is available, else
            "cpu".

    Returns:
        A context manager to enter once.

    Raises:
        ValueError: `precision` is unknown.
        ImportError: AMP_FP8 without TransformerEngine, or without composer-trainer.
        RuntimeError: AMP_FP8 on a device of compute capability below 8.9.

    Example:
        >>> linear = torch.nn.Linear(2, 2)
        >>> with get_precision_context("amp_bf16", device_type="cpu"):
        ...     linear(torch.ones(1, 2)).dtype
        torch.bfloat16
    """
    precision = Precision(precision)
    if precision is Precision.AMP_FP8:
        in_fp8: Callable[..., contextlib.AbstractContextManager[Any]] = load("composer.core.fp8", "fp8_context")
        return in_fp8(precision_config, fp8_autocast_enabled)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if precision is Precision.FP32:
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _UNCHANGED
    return torch.autocast(device_type, dtype=_AMP_DTYPES[precision])


def precision_context_of(state: State, fp8_autocast_enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager of `get_precision_context` for the precision and the device of a run."""
    kind = state.device.torch_type
    return get_precision_context(state.precision, state.precision_config, fp8_autocast_enabled, device_type=kind)


def validate_precision(precision: Precision, device: Device) -> None:
    """Check that a device supports a precision.

    Args:
        precision: The precision.
        device: The device of the run.

    Raises:
        ValueError: `device` is the CPU, and `precision` is AMP_FP8.
    """
    if device.name == "cpu" and precision is Precision.AMP_FP8:
        raise ValueError(
            f"`precision` must be supported by the device, got {precision.value!r}, which is "
            f"not supported for CPU training. Use 'amp_bf16' or 'fp32'."
        )
