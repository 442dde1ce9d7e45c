"""Loss functions for class targets, given as indices or as probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from composer.core._registry import registered_names
from composer.loss.utils import ensure_targets_one_hot, infer_target_type, innermost_loss, loss_setting

_MULTI_LABEL = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.multilabel_soft_margin_loss,
)
_MULTI_LABEL_MODULES = (torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss, torch.nn.MultiLabelSoftMarginLoss)
_REDUCTIONS = ("none", "mean", "sum")


def soft_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute the cross-entropy with class indices or class probabilities.

    Indices are passed to `torch.nn.functional.cross_entropy`. With probabilities t, the loss of a position is
    `-sum_c weight[c] * t[c] * log_softmax(input)[c]`, and the mean is its sum over all positions divided by `t.sum()`:
    positions whose targets are all zero do not count.

    Args:
        input: Logits, shape (N, C, ...), floating.
        target: Indices, shape (N, ...), int64; or probabilities, shape (N, C, ...), floating (integers are converted).
        weight: Weight of each class, shape (C,). With probabilities it does not enter the divisor of the mean.
        ignore_index: Index that does not count. Of probabilities, the positions of zeros do not count.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or shape (N, ...) with `reduction="none"`.

    Raises:
        RuntimeError: The shapes fit neither kind of target.
        ValueError: `reduction` is unknown, or the targets sum to zero and `reduction` is "mean" (checked on the CPU
            only; elsewhere the loss is nan).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> soft_cross_entropy(logits, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        tensor(0.4269)

    Differs: the warning about targets that sum to less than 1 allows for rounding in the dtype of the targets. There is
        no warning about `ignore_index` with probabilities: a run may have both, as methods that mix examples turn
        indices into probabilities.
    """
    if infer_target_type(input, target) == "indices":
        return F.cross_entropy(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"`reduction` must be one of {_REDUCTIONS}, got {reduction!r}. Use 'mean' for the average.")
    if not target.is_floating_point():
        target = target.to(input.dtype)
    if reduction != "mean":
        return F.cross_entropy(input, target, weight=weight, reduction=reduction)
    dim = -1 if target.ndim == 1 else 1
    num_examples = target.numel() // target.shape[dim]
    mass = target.sum(dtype=torch.promote_types(target.dtype, torch.float32))  # fp16 overflows on segmentation maps
    _check_mass(mass, num_examples, torch.finfo(target.dtype).eps)
    loss = F.cross_entropy(input, target, weight=weight)
    return loss * (num_examples / mass).to(loss.dtype)


def _check_mass(mass: torch.Tensor, num_examples: int, eps: float) -> None:
    if mass.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading the value would synchronize
    total = mass.item()
    if total <= 0:
        raise ValueError(
            f"`target` must have a positive sum for the mean, got {total!r}. Skip batches without targets, "
            f"or use `reduction='sum'`."
        )
    if total < num_examples * (1 - 16 * eps):
        warnings.warn(
            f"Some targets have less than 1 total probability: their sum is {total:g} for {num_examples} "
            f"examples. The mean is taken over the sum.",
            stacklevel=3,
        )


def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "sum",
    pos_weight: torch.Tensor | None = None,
    scale_by_batch_size: bool = True,
) -> torch.Tensor:
    """Compute the binary cross-entropy of each class, with class indices or class probabilities.

    Args:
        input: Logits, shape (N, C, ...), floating.
        target: Indices of any integer dtype, shape (N, ...), where a negative one is an example of no class; or one
            value in [0, 1] per class, shape (N, C, ...), which is converted to float32.
        weight: Weight of each element; must broadcast to `input`.
        reduction: "sum", "mean" or "none".
        pos_weight: Weight of the positive term; must broadcast to `input`.
        scale_by_batch_size: Divide the result by N.

    Returns:
        A scalar, or shape (N, C, ...) with `reduction="none"`.

    Raises:
        RuntimeError: The shapes fit neither kind of target.
        ValueError: `reduction` is unknown, indices are not integers, or one is C or larger (checked on the CPU only).

    Example:
        >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.tensor([0, 2]))
        tensor(2.0794)

    Source: Wightman, Touvron, Jegou, "ResNet strikes back", arXiv:2110.00476, section 3.
    """
    target = ensure_targets_one_hot(input, target)
    loss = F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)
    return loss / input.shape[0] if scale_by_batch_size else loss


def is_multi_label(loss: Any) -> bool:
    """Return True for the binary losses of torch, which treat each label as a problem of two classes.

    Args:
        loss: A loss or a model; see `composer.loss.utils.innermost_loss`.

    Example:
        >>> is_multi_label(torch.nn.BCEWithLogitsLoss()), is_multi_label(torch.nn.CrossEntropyLoss())
        (True, False)
    """
    inner = innermost_loss(loss)
    return isinstance(inner, _MULTI_LABEL_MODULES) or inner in _MULTI_LABEL


def is_mean_of_classes(loss: Any) -> bool:
    """Return True for a mean over positions that is linear in class probabilities, such as a cross-entropy.

    Return True also for a loss of unknown computation. Other losses declare themselves with an attribute
    `is_mean_of_classes = False`; the binary losses of torch and losses that sum are known.

    Args:
        loss: A loss or a model; see `composer.loss.utils.innermost_loss`.

    Example:
        >>> (
        ...     is_mean_of_classes(torch.nn.CrossEntropyLoss()),
        ...     is_mean_of_classes(torch.nn.CrossEntropyLoss(reduction="sum")),
        ... )
        (True, False)
    """
    inner = innermost_loss(loss)
    if inner is binary_cross_entropy_with_logits or is_multi_label(inner):
        return False
    return getattr(inner, "is_mean_of_classes", True) and loss_setting(loss, "reduction") in (None, "mean")


loss_registry: dict[str, Callable[..., torch.Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""Loss functions by name."""


__getattr__ = registered_names(__name__, "composer.loss")
