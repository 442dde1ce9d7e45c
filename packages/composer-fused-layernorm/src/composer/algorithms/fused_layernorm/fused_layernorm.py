"""The layer, `apply_fused_layernorm` and the algorithm `FusedLayerNorm`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.utils.normalization import convert_norm, replace_norms
from composer.core import ADDS_NORMS, REPLACES_BLOCKS, REPLACES_LAYERNORMS, REPLACES_NORMS, Algorithm, Event, Placement

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_LOW = (torch.bfloat16, torch.float16)


class MixedLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` whose output has the dtype of its input, under autocast too.

    Autocast casts a low-precision input to float32, and the output stays in float32. Here the kernel of torch reads the
    input without a cast, with weights and statistics in float32, and rounds the output once. Without autocast, and for
    float32 inputs, this layer equals `torch.nn.LayerNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     MixedLayerNorm(4)(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dimensions."""
        device_type = input.device.type
        if input.dtype not in _LOW or input.is_meta or not torch.is_autocast_enabled(device_type):
            return super().forward(input)
        with torch.autocast(device_type, enabled=False):  # it would cast to float32
            if _has_kernel(input, self.weight, self.bias):
                return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
            weight, bias = _float(self.weight), _float(self.bias)
            return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)

    @staticmethod
    def from_layernorm(module: nn.LayerNorm, module_index: int = -1) -> MixedLayerNorm:
        """Return the replacement of a layer, with the same parameter objects.

        Args:
            module: The layer to replace.
            module_index: Its index among the replaced layers; unused.
        """
        return convert_norm(module, MixedLayerNorm)


def _has_kernel(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Return True if one kernel normalizes an input with parameters of these dtypes."""
    if torch.compiler.is_compiling():
        return False  # the compiler fuses the casts
    present = [p for p in (weight, bias) if p is not None]
    if all(p.dtype is input.dtype for p in present):
        return True
    if weight is None or any(p.dtype is not torch.float32 for p in present):
        return False
    return _takes_mixed(input.device.type, input.dtype, bias is not None)


def _float(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.float()


@cache
def _takes_mixed(device_type: str, dtype: torch.dtype, bias: bool) -> bool:
    """Return True if torch's kernels on a device accept low-precision inputs with float32 weights; tried once."""
    if device_type not in ("cpu", "cuda"):
        return False  # some reinterpret the bits of the weights as `dtype`
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor([[1.0, -1.0]], device=device_type, dtype=dtype, requires_grad=True)
        weight = torch.full((2,), 1.5, device=device_type, requires_grad=True)
        try:
            y = F.layer_norm(x, (2,), weight, torch.full_like(weight, 0.25) if bias else None)
            (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        except RuntimeError:
            return False
    expected = x.new_tensor([[1.75, -1.25]] if bias else [[1.5, -1.5]])
    return y.dtype is dtype and grad.dtype is torch.float32 and torch.allclose(y, expected, atol=0.02)


def apply_fused_layernorm(
    model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> None:
    """Replace each `torch.nn.LayerNorm` in a model, in place, by a `MixedLayerNorm` with the same parameters.

    Layers whose class overrides `forward`, and parametrized layers, are not replaced.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        optimizers: The optimizer of the model; unused, because the parameters stay the same objects.

    Warns:
        NoEffectWarning: The model has no `MixedLayerNorm` afterwards.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> apply_fused_layernorm(model)
        >>> type(model[1]).__name__
        'MixedLayerNorm'

    Source: none.
    Differs: an earlier method of this name used the kernel of NVIDIA Apex; this one uses that of torch.
    """
    replace_norms("apply_fused_layernorm", model, nn.LayerNorm, MixedLayerNorm, optimizers)


class FusedLayerNorm(Algorithm):
    """Computes layer normalization without the casts of autocast, with weights in float32.

    At INIT the layers are replaced; see `apply_fused_layernorm`. They work on examples one by one, so microbatches
    equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`. **Cost** under autocast, saves the
    casts of activations to float32 and their memory if torch has a kernel for low-precision inputs with float32
    weights; otherwise costs a cast of the output. **Compilation** static: no shape depends on time or data.

    Example:
        >>> FusedLayerNorm()
        FusedLayerNorm()

    Source: none.
    Differs: an earlier method of this name used the kernel of NVIDIA Apex and new weights; this one uses the kernel
        of torch and keeps the weights.
    """

    events = frozenset({Event.INIT})
    placement = Placement(
        provides={REPLACES_NORMS, REPLACES_LAYERNORMS},
        after={REPLACES_BLOCKS, ADDS_NORMS},
        excludes={REPLACES_LAYERNORMS},
    )

    def __init__(self) -> None:
        pass

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a run that used it must continue with it."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers."""
        apply_fused_layernorm(state.model, state.optimizers)
