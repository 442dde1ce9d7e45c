"""The layer, the function that replaces the layers of a model with it, then the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.utils.normalization import check_apply_at, convert_norm, is_low_precision, replace_norms
from composer.core import ADDS_NORMS, REPLACES_BLOCKS, REPLACES_NORMS, Algorithm, Event, Placement, Precision

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


class LPGroupNorm(nn.GroupNorm):
    """A `torch.nn.GroupNorm` that computes in the dtype of autocast instead of float32.

    Without autocast, and for float64 inputs, which autocast does not cast, it behaves like `torch.nn.GroupNorm`, which
    takes the same arguments.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LPGroupNorm(2, 4)(torch.zeros(3, 4, 5)).dtype
        torch.bfloat16
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize groups of channels of a tensor of shape (N, C, ...)."""
        device_type = input.device.type
        if input.dtype is torch.float64 or input.is_meta or not torch.is_autocast_enabled(device_type):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device_type)
        weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
        with torch.autocast(device_type, enabled=False):  # autocast would cast the inputs back to float32
            return F.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)

    @staticmethod
    def from_groupnorm(module: nn.GroupNorm, module_index: int = -1) -> LPGroupNorm:
        """Convert a `torch.nn.GroupNorm`; the new layer shares its parameters.

        Args:
            module: The layer to convert.
            module_index: Not used.

        Raises:
            TypeError: `module` is not a `torch.nn.GroupNorm`.
        """
        if not isinstance(module, nn.GroupNorm):
            raise TypeError(f"`module` must be a `torch.nn.GroupNorm`, got {type(module).__name__}. Leave it as it is.")
        return convert_norm(module, LPGroupNorm)


def _cast(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> nn.Module:
    """Replace each `torch.nn.GroupNorm` in a model, in place, by an `LPGroupNorm` with the same parameters.

    Subclasses that override `forward` and parametrized layers are not replaced.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        precision: The precision of the run. Unless it is AMP_FP16 or AMP_BF16, nothing is replaced.
        optimizers: The optimizer of the model. It does not change, because the parameters stay the same.

    Returns:
        The model itself.

    Raises:
        ValueError: `precision` is unknown.

    Warns:
        NoEffectWarning: The precision is not AMP_FP16 or AMP_BF16, or the model has no `LPGroupNorm` afterwards.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
        >>> model = apply_low_precision_groupnorm(model, "amp_bf16")
        >>> type(model[1]).__name__
        'LPGroupNorm'

    Source: none; autocast keeps group normalization in float32, and this does not.
    Differs: none.
    """
    if is_low_precision(precision, "apply_low_precision_groupnorm"):
        replace_norms("apply_low_precision_groupnorm", model, nn.GroupNorm, LPGroupNorm, optimizers)
    return model


class LowPrecisionGroupNorm(Algorithm):
    """Runs group normalization in the low precision of the rest of the model.

    At the event `apply_at` the layers are replaced; see `apply_low_precision_groupnorm`. They normalize each example
    separately, so microbatches equal one batch.

    **Events** `apply_at`. **Reads** `state.precision`. **Writes** modules of `state.model`. **Cost** saves casts of
    activations to float32 and their memory; statistics are still accumulated in float32, inside the kernel.
    **Compilation** static: no shape depends on time or data; entering autocast after compiling recompiles.

    Args:
        apply_at: INIT, BEFORE_LOAD or AFTER_LOAD. Parameter names do not change, so checkpoints fit in any case.

    Raises:
        ValueError: `apply_at` is another event.

    Example:
        >>> LowPrecisionGroupNorm()
        LowPrecisionGroupNorm(apply_at=Event.INIT)

    Source: none; autocast keeps group normalization in float32, and this does not.
    Differs: none.
    """

    placement = Placement(
        provides={REPLACES_NORMS},
        after={REPLACES_BLOCKS, ADDS_NORMS},
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
        apply_low_precision_groupnorm(state.model, state.precision, state.optimizers)
