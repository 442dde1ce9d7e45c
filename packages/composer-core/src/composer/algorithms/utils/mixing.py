"""Draw weights, and mix targets and losses, for algorithms that mix each example with a partner of weight m."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from composer.core.precision import get_precision_context
from composer.loss.loss import is_mean_of_classes
from composer.loss.utils import class_weights_of, ensure_targets_one_hot, ignored_label
from composer.utils.misc import unwrapped_model

if TYPE_CHECKING:
    from composer.core.state import State


def check_alpha(alpha: Any) -> None:
    """Check the parameter of a symmetric Beta distribution.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` is negative, infinite or NaN.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise TypeError(f"`alpha` must be a number, got {alpha!r}. Use for example `alpha=0.2`.")
    if not 0 <= float(alpha) < math.inf:
        raise ValueError(
            f"`alpha` must not be negative or infinite, got {alpha!r}. Use for example `alpha=0.2`, which mixes "
            f"little, or `alpha=1.0`, which draws all weights alike."
        )


def draw_beta(alpha: float) -> float:
    """Draw from Beta(alpha, alpha), on the host: a number drawn on the device would have to be read back.

    Args:
        alpha: At least 0; 0 draws 0. Checked by `check_alpha`.
    """
    check_alpha(alpha)
    if alpha == 0:
        return 0.0
    # X / (X + Y) of two Gamma variables is Beta distributed. torch.distributions samples with `_standard_gamma` too.
    first, second = torch._standard_gamma(torch.full((2,), float(alpha), dtype=torch.float64)).tolist()
    return float(first / max(first + second, torch.finfo(torch.float64).tiny))


def mix_targets(state: State, target_key: Any, indices: torch.Tensor, weight: float, name: str) -> None:
    """Replace the targets t of the batch by `(1 - m) * t + m * t[indices]`, one value per class.

    The current targets are mixed: another algorithm may have mixed inputs and targets before. Positions that the loss
    of the model ignores have zeros for every class. If the loss is a mean over all positions, the targets at the other
    positions are scaled up, so that the loss equals the interpolated loss of class indices; see
    `composer.loss.utils.dense_targets`.

    Args:
        state: The state of the run; the number of classes is taken from its outputs.
        target_key: The key of the targets in the batch.
        indices: The indices of the partners, shape (N,), int64.
        weight: The weight m.
        name: The name of the algorithm, for messages.

    Raises:
        NotImplementedError: The outputs are not a single tensor.
    """
    if not isinstance(state.outputs, torch.Tensor):
        raise NotImplementedError(
            f"`{name}` needs the model's outputs to be one tensor, to determine the number of classes, got "
            f"{type(state.outputs).__name__}. Return logits from the model, or use `interpolate_loss=True` if the "
            f"`loss` of the model reads the targets of the batch."
        )
    ignored = ignored_label(state.model)
    target = ensure_targets_one_hot(
        state.outputs,
        state.batch_get_item(target_key),
        ignore_index=-100 if ignored is None else ignored,
        rescale=is_mean_of_classes(state.model),
        class_weights=class_weights_of(state.model),
    )
    state.batch_set_item(target_key, torch.lerp(target, target.index_select(0, indices), weight))


def mix_loss(
    state: State,
    target_key: Any,
    indices: torch.Tensor,
    weight: float,
    name: str,
    *,
    target: torch.Tensor | None = None,
) -> None:
    """Replace the loss l by `(1 - m) * l + m * l'`, where l' is the loss for the targets of the partners.

    Args:
        state: The state of the run; its model has a method `loss(outputs, batch)`, which must read the targets.
        target_key: The key of the targets in the batch, which are not modified.
        indices: The indices of the partners, shape (N,), int64.
        weight: The weight m.
        name: The name of the algorithm, for messages.
        target: The targets for which the loss was computed, such as smoothed ones; None: those of the batch.

    Raises:
        NotImplementedError: The loss is not a single tensor, or was computed in the forward pass.
        AttributeError: The model has no method `loss`.
    """
    if not isinstance(state.loss, torch.Tensor):
        raise NotImplementedError(
            f"`{name}` interpolates a loss that is one tensor, got {type(state.loss).__name__}. Use "
            f"`interpolate_loss=False`."
        )
    # A wrapper such as DDP does not forward the method.
    loss: Any = getattr(state.model, "loss", None) or getattr(getattr(state.model, "module", None), "loss", None)
    if not callable(loss):
        raise AttributeError(
            f"`{name}(interpolate_loss=True)` calls `model.loss(outputs, batch)`, but the model has no such method. "
            f"Add one, or use `interpolate_loss=False`."
        )
    original = state.batch_get_item(target_key)
    target = original if target is None else target
    state.batch_set_item(target_key, target.index_select(0, indices))
    # In the precision of the first loss: autocast is no longer active here.
    context = get_precision_context(state.precision, state.precision_config, device_type=state.loss.device.type)
    with context:
        other = loss(state.outputs, state.batch)
    state.batch_set_item(target_key, original)
    if other is state.loss:
        raise NotImplementedError(
            f"`{name}` cannot interpolate the loss of `{type(unwrapped_model(state.model)).__name__}`, which is "
            f"computed in the forward pass without the targets of the partners. Override `loss` to "
            f"compute it from outputs and batch."
        )
    state.loss = torch.lerp(state.loss, other.to(state.loss.dtype), weight)
