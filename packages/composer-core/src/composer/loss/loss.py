"""Loss functions for class targets, given as indices or as probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from composer.loss.utils import ensure_targets_one_hot, infer_target_type, innermost_loss, loss_setting

_MULTI_LABEL = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.multilabel_soft_margin_loss,
)
_MULTI_LABEL_MODULES = (torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss, torch.nn.MultiLabelSoftMarginLoss)
_REDUCTIONS = ("none", "mean", "sum")
_SMOOTH = 1e-5  # in numerator and denominator: an absent class that is not predicted either has loss 0


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
    if weight is None and _has_fast_mean(input, target):
        result: torch.Tensor = _MeanOfProbabilities.apply(input, target, mass, dim)[0]
        return result
    loss = F.cross_entropy(input, target, weight=weight)
    return loss * (num_examples / mass).to(loss.dtype)


def _has_fast_mean(input: torch.Tensor, target: torch.Tensor) -> bool:
    """Return True on the CPU. Compilers fuse product and sum, and GPUs limit the length of a dot product."""
    return (
        input.device.type == "cpu"
        and input.dtype == target.dtype in (torch.float32, torch.float64)
        and not target.requires_grad
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _MeanOfProbabilities(torch.autograd.Function):
    """The mean `-sum(target * log_softmax(input)) / mass`, without a tensor of products, which would be slower.

    The gradient is `(softmax(input) * sum_c target - target) / mass`.
    """

    @staticmethod
    def forward(input: torch.Tensor, target: torch.Tensor, mass: torch.Tensor, dim: int) -> Any:
        log_probabilities = torch.log_softmax(input, dim)
        loss = torch.dot(log_probabilities.reshape(-1), target.reshape(-1)).neg_().div_(mass)
        return loss, log_probabilities

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, target, mass, ctx.dim = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, mass, output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> Any:
        if grad is None:
            return None, None, None, None
        input, target, mass, log_probabilities = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is needed
            rows = target.sum(ctx.dim, keepdim=True)
            result = (torch.softmax(input, ctx.dim) * rows - target) * (grad / mass)
        else:
            result = torch._log_softmax_backward_data(target, log_probabilities, ctx.dim, input.dtype)
            result.mul_(-grad / mass)
        return result, None, None, None


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


class DiceLoss(torch.nn.Module):
    """Dice loss: one minus the soft Dice overlap of predictions and targets, per class.

    With the sums over the spatial dimensions, `1 - (2 * sum(p * t) + 1e-5) / (sum(p) + sum(t) + 1e-5)`. Positions whose
    targets are all zero (negative indices) are masked in the predictions p.

    Args:
        sigmoid: True if p is the sigmoid of the input.
        softmax: True if p is the softmax of the input over classes.
        squared_pred: True if the denominator sums squares.
        jaccard: True if the denominator is twice the union, `2 * (sum(p) + sum(t) - sum(p * t))`: the Jaccard index.
        batch: True if the sums also go over the batch, for one loss per class instead of one per example and class.
        ignore_absent_classes: Ignore classes without a target.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: `reduction` is unknown, or both `sigmoid` and `softmax` are True.

    Example:
        >>> prediction = torch.tensor([[[0.8, 0.1], [0.2, 0.9]]])  # one example, two classes, two pixels
        >>> DiceLoss()(prediction, torch.tensor([[0, 1]]))
        tensor(0.1504)

    Source: Milletari, Navab, Ahmadi, "V-Net", arXiv:1606.04797, section 3. Differs: `ignore_absent_classes` in a batch
        without any class gives 0 instead of nan.
    """

    def __init__(
        self,
        sigmoid: bool = False,
        softmax: bool = False,
        squared_pred: bool = False,
        jaccard: bool = False,
        batch: bool = False,
        ignore_absent_classes: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"`reduction` must be one of {_REDUCTIONS}, got {reduction!r}. Use 'mean' for the average."
            )
        if sigmoid and softmax:
            raise ValueError("`softmax` must be False if `sigmoid` is True, got True for both. Choose one of them.")
        self.sigmoid = sigmoid
        self.softmax = softmax
        self.squared_pred = squared_pred
        self.jaccard = jaccard
        self.batch = batch
        self.ignore_absent_classes = ignore_absent_classes
        self.reduction = reduction

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss.

        Args:
            input: Predictions or logits, shape (N, C, ...) with at least one spatial dimension.
            target: Indices of any integer dtype, shape (N, ...); or one value per class, shape (N, C, ...), which is
                converted to float32.

        Returns:
            A scalar; with `reduction="none"` shape (N, C), or (C,) with `batch`. `ignore_absent_classes` then selects
            the classes that are present, shape (P,), which reads their number from the device.

        Raises:
            RuntimeError: The shapes fit neither kind of target.
            ValueError: There is nothing to sum over, indices are not integers, or one is C or larger (checked on the
                CPU only).
        """
        target = ensure_targets_one_hot(input, target, ignore_index=-100)
        input = input.to(torch.promote_types(input.dtype, target.dtype))  # the sums overflow in fp16
        if self.sigmoid:
            input = torch.sigmoid(input)
        elif self.softmax:
            input = torch.softmax(input, dim=1)
        input = torch.where((target != 0).any(dim=1, keepdim=True), input, 0)
        dims = [*([0] if self.batch else []), *range(2, input.ndim)]
        if not dims:
            raise ValueError(
                f"`input` must have spatial dimensions, got shape {tuple(input.shape)}. "
                f"Use `batch=True` to sum over the batch."
            )
        overlap = (input * target).sum(dim=dims)
        if self.squared_pred:
            input, target = input.square(), target.square()
        target_sum = target.sum(dim=dims)
        union = input.sum(dim=dims) + target_sum
        if self.jaccard:
            union = 2 * (union - overlap)
        loss = 1 - (2 * overlap + _SMOOTH) / (union + _SMOOTH)
        return self._reduce(loss, target_sum > 0)

    def _reduce(self, loss: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        if not self.ignore_absent_classes:
            return loss if self.reduction == "none" else getattr(loss, self.reduction)()
        if self.reduction == "none":
            return loss[present]
        total = (loss * present).sum()
        return total if self.reduction == "sum" else total / present.sum().clamp(min=1)


def is_multi_label(loss: Any) -> bool:
    """Return True if torch's binary losses compute a loss, to which each label is a problem of two classes.

    Args:
        loss: A loss or a model; see `composer.loss.utils.innermost_loss`.

    Example:
        >>> is_multi_label(torch.nn.BCEWithLogitsLoss()), is_multi_label(torch.nn.CrossEntropyLoss())
        (True, False)
    """
    inner = innermost_loss(loss)
    return isinstance(inner, _MULTI_LABEL_MODULES) or inner in _MULTI_LABEL


def is_mean_of_classes(loss: Any) -> bool:
    """Return True unless a loss is known to be no mean over positions that is linear in class probabilities.

    Cross-entropies are such a mean, and so is the loss of a model that does not say how it is computed.

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
    is_other = isinstance(inner, DiceLoss) or inner is binary_cross_entropy_with_logits or is_multi_label(inner)
    return not is_other and loss_setting(loss, "reduction") in (None, "mean")


loss_registry: dict[str, Callable[..., torch.Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""Loss functions by name."""
