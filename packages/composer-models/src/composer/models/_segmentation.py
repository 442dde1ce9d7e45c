"""The loss of segmentation models: cross entropy and Dice over pixels or voxels."""

from __future__ import annotations

from torch import Tensor

from composer.loss import DiceLoss, soft_cross_entropy
from composer.loss.utils import dense_targets
from composer.models.tasks._targets import check_shapes, check_tensors
from composer.utils import check_finite

_DICE = DiceLoss(softmax=True, reduction="none")


class SegmentationLoss:
    """A weighted sum of the cross entropy and the Dice loss.

    The cross entropy is the mean over all positions that are not ignored, the Dice loss that over examples and classes.

    Args:
        cross_entropy_weight: Weight of the cross entropy; 0 disables it.
        dice_weight: Weight of the Dice loss; 0 disables it.
        ignore_index: Positions with this target are ignored; in dense targets, those with only zeros are.
        dice_of_background: Include class 0 in the Dice loss.

    Raises:
        ValueError: A weight is negative, or both are 0.

    Example:
        >>> import torch
        >>> loss = SegmentationLoss(dice_weight=0.5, ignore_index=255)
        >>> loss(torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)).shape
        torch.Size([])
    """

    def __init__(
        self,
        cross_entropy_weight: float = 1.0,
        dice_weight: float = 0.0,
        ignore_index: int = -100,
        dice_of_background: bool = True,
    ) -> None:
        weights = {"cross_entropy_weight": cross_entropy_weight, "dice_weight": dice_weight}
        check_finite("Use 0 to disable that loss.", **weights, least=0)
        if cross_entropy_weight == dice_weight == 0:
            raise ValueError("`cross_entropy_weight` or `dice_weight` must be positive, got 0 for both.")
        self.cross_entropy_weight = cross_entropy_weight
        self.dice_weight = dice_weight
        self.ignore_index = ignore_index
        self.dice_of_background = dice_of_background

    def __call__(self, outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """Return the loss.

        Args:
            outputs: Class scores, shape (N, C, ...).
            targets: Class indices, shape (N, ...), or class probabilities, shape (N, C, ...).
            reduction: "mean" for a scalar, or "none" for one loss per example, shape (N,).

        Raises:
            TypeError: The outputs or the targets are not a tensor.
            ValueError: The targets do not fit the outputs, or `reduction` is unknown.
        """
        check_tensors(outputs, targets)
        check_shapes(outputs, targets)
        if reduction not in ("mean", "none"):
            raise ValueError(f"`reduction` must be 'mean' or 'none', got {reduction!r}.")
        losses = []
        if self.cross_entropy_weight > 0:
            losses.append(self.cross_entropy_weight * self._cross_entropy(outputs, targets, reduction))
        if self.dice_weight > 0:
            losses.append(self.dice_weight * self._dice(outputs, targets, reduction))
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        dense = targets.shape == outputs.shape
        targets = targets if dense else targets.long()
        loss = soft_cross_entropy(outputs, targets, ignore_index=self.ignore_index, reduction=reduction)
        if reduction == "mean":
            return loss
        weight = targets.sum(dim=1) if dense else targets != self.ignore_index
        return loss.flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1)

    def _dice(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        if targets.shape != outputs.shape:
            targets = dense_targets(targets, outputs.shape[1], ignore_index=self.ignore_index)
        else:  # where positions are ignored, algorithms multiply the others for the mean of the cross entropy
            targets = targets / targets.sum(dim=1).amax().clamp(min=1)
        loss: Tensor = _DICE(outputs, targets)[:, 0 if self.dice_of_background else 1 :]
        return loss.mean() if reduction == "mean" else loss.mean(dim=1)
