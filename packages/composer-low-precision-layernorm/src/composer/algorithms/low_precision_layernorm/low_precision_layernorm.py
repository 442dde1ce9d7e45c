"""The layer, the function that puts it into a model, then the class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from composer.algorithms.warnings import NoEffectWarning
from composer.core import (
    ADDS_NORMS,
    REPLACES_BLOCKS,
    REPLACES_LAYERNORMS,
    REPLACES_NORMS,
    Algorithm,
    Event,
    Placement,
    Precision,
    State,
)
from composer.loggers import Logger
from composer.utils import module_surgery

__all__ = ["LPLayerNorm", "LowPrecisionLayerNorm", "apply_low_precision_layernorm"]

_PRECISIONS = (Precision.AMP_FP16, Precision.AMP_BF16)
_APPLY_AT = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


class LPLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` that computes in the dtype of autocast, which otherwise keeps it in float32.

    Without autocast, and for float64 inputs, which autocast leaves alone, it is a `torch.nn.LayerNorm`.

    Args:
        normalized_shape: As all other arguments, one of `torch.nn.LayerNorm`.
        eps: See `normalized_shape`.
        elementwise_affine: See `normalized_shape`.
        device: See `normalized_shape`.
        dtype: See `normalized_shape`.
        bias: See `normalized_shape`.

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
        with torch.autocast(device_type, enabled=False):  # it would cast everything up again
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)

    @staticmethod
    def from_layernorm(module: nn.LayerNorm, module_index: int = -1) -> LPLayerNorm:
        """Make the replacement of a layer, with its very parameters.

        Args:
            module: The layer to replace.
            module_index: Its number among the layers replaced. The replacement does not depend on it.

        Raises:
            TypeError: It is no `torch.nn.LayerNorm`.
        """
        if not isinstance(module, nn.LayerNorm):
            raise TypeError(f"`module` must be a `torch.nn.LayerNorm`, got {type(module).__name__}. Leave it as it is.")
        new = LPLayerNorm.__new__(LPLayerNorm)
        vars(new).update(vars(module))  # all that it has: parameters, hooks, training flag, attributes of a subclass
        new._parameters = module._parameters.copy()
        new._compiled_call_impl = None
        return new


def _cast(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Replace each `torch.nn.LayerNorm` in a model, in place, by an `LPLayerNorm` with the same parameters.

    Layers whose class has a `forward` of its own, and parametrized ones, stay.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        precision: The precision of the run. Unless it is AMP_FP16 or AMP_BF16, nothing is replaced.
        optimizers: The optimizer of the model. It need not be told anything, as it keeps its parameters.

    Raises:
        ValueError: `precision` is unknown.

    Warns:
        NoEffectWarning: The precision is another, or the model has no `LPLayerNorm` afterwards.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> apply_low_precision_layernorm(model, "amp_bf16")
        >>> type(model[1]).__name__
        'LPLayerNorm'

    Source: none; autocast keeps layer normalization in float32, and this does not.
    Differs: none.
    """
    if precision is None or Precision(precision) not in _PRECISIONS:
        warnings.warn(
            "Low Precision LayerNorm only applies to AMP_FP16 and AMP_BF16 precisions, "
            f"got {precision if precision is None else Precision(precision).value!r}. Leave it out.",
            NoEffectWarning,
            stacklevel=2,
        )
        return

    def lowered(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.LayerNorm)
        if module_surgery.overrides_forward(module, nn.LayerNorm) or is_parametrized(module):
            return None
        return LPLayerNorm.from_layernorm(module, index)

    module_surgery.replace_module_classes(model, {nn.LayerNorm: lowered}, optimizers=optimizers)
    if not module_surgery.count_module_instances(model, LPLayerNorm):
        warnings.warn(
            "No instances of torch.nn.LayerNorm found that may be replaced; `apply_low_precision_layernorm` changed "
            "nothing.",
            NoEffectWarning,
            stacklevel=2,
        )


class LowPrecisionLayerNorm(Algorithm):
    """Lets layer normalization compute in the low precision of the rest of the model.

    At one of INIT, BEFORE_LOAD and AFTER_LOAD the layers are replaced; see `apply_low_precision_layernorm`. They work
    on examples one by one, so microbatches equal one batch.

    **Events** `apply_at`. **Reads** `state.precision`. **Writes** modules of `state.model`. **Cost** saves casts of
    activations to float32 and their memory; the statistics are summed in float32, inside torch's kernel.
    **Compilation** static: no shape depends on time or data; entering autocast after compiling recompiles.

    Args:
        apply_at: When to replace the layers. A later event does not matter to checkpoints: no name changes.

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
        if apply_at not in _APPLY_AT:
            raise ValueError(
                f"`apply_at` must be Event.INIT, Event.BEFORE_LOAD or Event.AFTER_LOAD, got {apply_at!r}. "
                f"Later, the model may be wrapped or compiled."
            )
        self.apply_at = apply_at
        self.events = frozenset({apply_at})

    @staticmethod
    def required_on_load() -> bool:
        """A run that was trained with it is continued with it."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers."""
        apply_low_precision_layernorm(state.model, state.precision, state.optimizers)
