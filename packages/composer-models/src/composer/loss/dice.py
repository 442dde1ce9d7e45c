"""The Dice loss of segmentations."""

from __future__ import annotations

import torch

from composer.loss.utils import ensure_targets_one_hot

_REDUCTIONS = ("none", "mean", "sum")
_SMOOTH = 1e-5  # in numerator and denominator: an absent class that is not predicted either has loss 0


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

    is_mean_of_classes = False

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
        present = target_sum > 0
        if not self.ignore_absent_classes:
            reduced: torch.Tensor = loss if self.reduction == "none" else getattr(loss, self.reduction)()
            return reduced
        if self.reduction == "none":
            return loss[present]
        total = (loss * present).sum()
        return total if self.reduction == "sum" else total / present.sum().clamp(min=1)
