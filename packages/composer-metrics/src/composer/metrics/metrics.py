"""Metrics for classification and segmentation."""

# No `from __future__ import annotations`: TorchScript cannot read the annotations of attributes as strings.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from composer.loss import soft_cross_entropy
from composer.metrics._functional import check_class_scores, confusion_matrix, full_precision
from composer.utils import check_finite, renamed_arguments


class _MeanOverBatches(Metric):
    """Mean of one scalar per update. Every batch has the same weight, whatever its size."""

    full_state_update = False
    higher_is_better = False

    sum_loss: Tensor
    total_batches: Tensor

    def __init__(self, dist_sync_on_step: bool) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total_batches", default=torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, loss: Tensor) -> None:
        self.sum_loss += loss
        self.total_batches += 1

    def compute(self) -> Tensor:
        return self.sum_loss / self.total_batches


class CrossEntropy(_MeanOverBatches):
    """Cross entropy, averaged over batches.

    Args:
        ignore_index: Class index targets with this value do not count.
        dist_sync_on_step: Also synchronize the value that `forward` returns.

    States: `sum_loss` (float32), `total_batches` (int64).

    Example:
        >>> metric = CrossEntropy()
        >>> metric.update(torch.zeros(2, 4), torch.tensor([0, 3]))
        >>> round(metric.compute().item(), 4)  # log(4)
        1.3863
    """

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    @renamed_arguments(target="targets")
    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add one batch.

        Args:
            preds: Logits, shape (N, C, ...).
            targets: Class indices, shape (N, ...), or class probabilities, shape (N, C, ...).
        """
        self._add(soft_cross_entropy(full_precision(preds), targets, ignore_index=self.ignore_index))


class LossMetric(_MeanOverBatches):
    """A loss function as a metric, averaged over batches.

    Args:
        loss_function: Called with the two arguments of `update`; returns a number or a tensor with one element.
        dist_sync_on_step: Also synchronize the value that `forward` returns.

    States: `sum_loss` (float32), `total_batches` (int64).

    Raises:
        TypeError: `loss_function` is not callable.

    Example:
        >>> metric = LossMetric(torch.nn.functional.mse_loss)
        >>> metric.update(torch.zeros(2), torch.ones(2))
        >>> metric.update(torch.zeros(2), torch.zeros(2))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(self, loss_function: Callable[[Any, Any], Tensor | float], dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        if not callable(loss_function):
            raise TypeError(f"`loss_function` must be callable, got {loss_function!r}.")
        self._loss_function = loss_function

    @renamed_arguments(target="targets")
    def update(self, preds: Any, targets: Any) -> None:
        """Add one batch.

        Args:
            preds: The first argument of the loss function.
            targets: The second argument of the loss function.

        Raises:
            ValueError: The loss has more than one element.
        """
        loss = torch.as_tensor(self._loss_function(preds, targets))
        if loss.numel() != 1:
            raise ValueError(
                f"`loss_function` must return a tensor with one element, got shape {tuple(loss.shape)}. "
                "Use the reduction 'mean' or 'sum'."
            )
        self._add(loss.reshape(()))


class MIoU(Metric):
    """Mean intersection over union, in percent.

    For class c, over everything seen: `IoU_c = TP_c / (TP_c + FP_c + FN_c)`; the mean is over the classes that occur in
    the targets or the predictions, and nan if there are none. The value does not depend on the split into batches or
    over processes.

    Args:
        num_classes: Number of classes C, at least 1.
        ignore_index: Pixels with this target do not count, as those with a negative one. A pixel with a target of C or
            more counts as a false positive of the predicted class.

    States: `total_intersect` and `total_union`, shape (C,), float64.

    Raises:
        ValueError: `num_classes` is below 1.

    Example:
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 1]]), 2).movedim(-1, 1)
        >>> metric = MIoU(num_classes=2)
        >>> metric.update(logits, torch.tensor([[0, 0, 0, 1]]))  # IoU 2/3 and 1/2
        >>> metric.compute()
        tensor(58.3333, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    takes_indices = True

    total_intersect: Tensor
    total_union: Tensor

    def __init__(self, num_classes: int, ignore_index: int = -1) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, least=1)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        zeros = torch.zeros(num_classes, dtype=torch.float64)
        self.add_state("total_intersect", default=zeros, dist_reduce_fx="sum")
        self.add_state("total_union", default=zeros.clone(), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add one batch.

        Args:
            logits: Class scores, shape (N, C, ...), for the first C <= `num_classes` classes.
            targets: Class indices, shape (N, ...), of any integer dtype.

        Raises:
            ValueError: A shape does not match.
        """
        check_class_scores(logits, targets, dim=1, at_most=self.num_classes)
        targets = targets.long()  # in an unsigned dtype, -1 would wrap around and could match
        keep = (targets != self.ignore_index) & (targets >= 0)
        counts = confusion_matrix(logits.argmax(dim=1), targets, self.num_classes, keep=keep)
        intersect = counts.diagonal()
        self.total_intersect += intersect
        self.total_union += counts.sum(dim=0) + counts[:-1].sum(dim=1) - intersect

    def compute(self) -> Tensor:
        return 100 * (self.total_intersect / self.total_union).nanmean()


class Dice(Metric):
    """Dice coefficient of the foreground classes, in percent, rounded to two decimals.

    For class c > 0, over everything seen: `Dice_c = 2 TP_c / (2 TP_c + FP_c + FN_c)`; the mean is over the foreground
    classes that occur in the targets or the predictions, and nan if there are none. The value does not depend on the
    split into batches or over processes.

    Args:
        num_classes: Number of classes, with or without the background, class 0: the logits have `num_classes` or
            `num_classes + 1` channels.
        ignore_index: Pixels with this target do not count, as those with a negative one. A pixel with any other target
            without a channel counts as a false positive of the predicted class.

    States: `intersection` (TP) and `area` (2 TP + FP + FN), shape (num_classes + 1,), int64.

    Raises:
        ValueError: `num_classes` is below 1.

    Example:
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 1]]), 2).movedim(-1, 1)
        >>> metric = Dice(num_classes=2)
        >>> metric.update(logits, torch.tensor([[0, 0, 0, 1]]))
        >>> metric.compute()  # 2 * 1 / (2 + 1)
        tensor(66.6700, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    takes_indices = True

    intersection: Tensor
    area: Tensor

    def __init__(self, num_classes: int, *, ignore_index: int = -100) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, least=1)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        zeros = torch.zeros(num_classes + 1, dtype=torch.int64)
        self.add_state("intersection", default=zeros, dist_reduce_fx="sum")
        self.add_state("area", default=zeros.clone(), dist_reduce_fx="sum")

    @renamed_arguments(pred="preds")
    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add one batch.

        Args:
            preds: Class scores, shape (N, C, ...); channel 0 is the background.
            targets: Class indices, shape (N, ...), of any integer dtype.

        Raises:
            ValueError: A shape does not match.
        """
        channels = preds.shape[1] if preds.ndim > 1 else self.num_classes
        if channels not in (self.num_classes, self.num_classes + 1):
            raise ValueError(
                f"`preds` must have {self.num_classes} channels, or {self.num_classes + 1} if `num_classes` does not "
                f"count the background, got shape {tuple(preds.shape)}."
            )
        check_class_scores(preds, targets, dim=1)
        targets = targets.long()
        keep = (targets != self.ignore_index) & (targets >= 0)
        counts = confusion_matrix(preds.argmax(dim=1), targets, channels, keep=keep)
        self.intersection[:channels] += counts.diagonal()
        self.area[:channels] += counts.sum(dim=0) + counts[:-1].sum(dim=1)

    def compute(self) -> Tensor:
        dice = 2 * self.intersection[1:].double() / self.area[1:]
        return torch.round(100 * dice.nanmean(), decimals=2)
