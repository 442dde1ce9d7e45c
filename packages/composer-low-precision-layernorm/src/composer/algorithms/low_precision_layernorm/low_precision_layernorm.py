"""The layer, the function that replaces the layers of a model with it, then the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.utils.normalization import check_apply_at, convert_norm, is_low_precision, replace_norms
from composer.core import (
    ADDS_NORMS,
    REPLACES_BLOCKS,
    REPLACES_LAYERNORMS,
    REPLACES_NORMS,
    Algorithm,
    Event,
    Placement,
    Precision,
)

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


class LPLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` that computes in the dtype of autocast instead of float32.

    Without autocast, and for float64 inputs, which autocast does not cast, it behaves like `torch.nn.LayerNorm`. The
    arguments are the same, but `device` and `dtype` come before `bias`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LPLayerNorm(4)(torch.zeros(2, 4)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float = 1e-05,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dimensions."""
        device_type = input.device.type
        if input.dtype is torch.float64 or input.is_meta or not torch.is_autocast_enabled(device_type):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device_type)
        weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
        with torch.autocast(device_type, enabled=False):  # autocast would cast the inputs back to float32
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)

    @staticmethod
    def from_layernorm(module: nn.LayerNorm, module_index: int = -1) -> LPLayerNorm:
        """Convert a `torch.nn.LayerNorm`; the new layer shares its parameters.

        Args:
            module: The layer to convert.
            module_index: Not used.

        Raises:
            TypeError: `module` is not a `torch.nn.LayerNorm`.
        """
        if not isinstance(module, nn.LayerNorm):
            raise TypeError(f"`module` must be a `torch.nn.LayerNorm`, got {type(module).__name__}. Leave it as it is.")
        return convert_norm(module, LPLayerNorm)


def _cast(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Replace each `torch.nn.LayerNorm` in a model, in place, by an `LPLayerNorm` with the same parameters.

    Subclasses that override `forward` and parametrized layers are not replaced.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        precision: The precision of the run. Unless it is AMP_FP16 or AMP_BF16, nothing is replaced.
        optimizers: The optimizer of the model. It does not change, because the parameters stay the same.

    Raises:
        ValueError: `precision` is unknown.

    Warns:
        NoEffectWarning: The precision is not AMP_FP16 or AMP_BF16, or the model has no `LPLayerNorm` afterwards.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> apply_low_precision_layernorm(model, "amp_bf16")
        >>> type(model[1]).__name__
        'LPLayerNorm'

    Source: none; autocast keeps layer normalization in float32, and this does not.
    Differs: none.
    """
    if is_low_precision(precision, "apply_low_precision_layernorm"):
        replace_norms("apply_low_precision_layernorm", model, nn.LayerNorm, LPLayerNorm, optimizers)


class LowPrecisionLayerNorm(Algorithm):
    """Runs layer normalization in the low precision of the rest of the model.

    At the event `apply_at` the layers are replaced; see `apply_low_precision_layernorm`. They normalize each example
    separately, so microbatches equal one batch.

    **Events** `apply_at`. **Reads** `state.precision`. **Writes** modules of `state.model`. **Cost** saves casts of
    activations to float32 and their memory; statistics are still accumulated in float32, inside the kernel.
    **Compilation** static: no shape depends on time or data; entering autocast after compiling recompiles.

    Args:
        apply_at: INIT, BEFORE_LOAD or AFTER_LOAD. Parameter names do not change, so checkpoints fit in any case.

    Raises:
        ValueError: `apply_at` is another event.

    Example:
        >>> LowPrecisionLayerNorm()
        LowPrecisionLayerNorm(apply_at=Event.INIT)

    Source: none; autocast keeps layer normalization in float32, and this does not.
    Differs: none.
    """

    placement = Placement(
        provides={REPLACES_NORMS, REPLACES_LAYERNORMS},
        after={REPLACES_BLOCKS, ADDS_NORMS},
        excludes={REPLACES_LAYERNORMS},
    )

    def __init__(self, apply_at: Event = Event.INIT) -> None:
        check_apply_at(apply_at)
        self.apply_at = apply_at
        self.events = frozenset({apply_at})

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a run that was trained with low precision is resumed with it."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers."""
        apply_low_precision_layernorm(state.model, state.precision, state.optimizers)
