"""Checks and conversion of classification targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassHingeLoss,
    MulticlassPrecisionRecallCurve,
    MulticlassStatScores,
)

from composer.metrics import Dice, MIoU

__all__ = ["check_shapes", "check_tensors", "index_targets", "takes_indices"]

# Base classes of torchmetrics' metrics that take one class index per example, and the metrics of this project.
_INDEX_METRICS = (
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassHingeLoss,
    MulticlassPrecisionRecallCurve,
    MulticlassStatScores,
    Dice,
    MIoU,
)


def takes_indices(metric: Metric) -> bool:
    """Return True if a metric supports only class indices, not probabilities."""
    return isinstance(metric, _INDEX_METRICS)


def check_tensors(outputs: Any, targets: Any) -> None:
    """Raise a TypeError unless outputs and targets are tensors."""
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"The {name} must be a tensor for the default loss function, got {type(value).__name__}. "
                "Pass a `loss_fn` that takes them."
            )


def check_shapes(outputs: Tensor, targets: Tensor, num_classes: int | None = None) -> None:
    """Raise a ValueError unless targets fit the outputs: wrong shapes may broadcast to plausible, wrong numbers."""
    shape = tuple(outputs.shape)
    if len(shape) < 2 or (num_classes is not None and shape[1] != num_classes):
        raise ValueError(f"The outputs must have shape (N, {num_classes or 'C'}, ...), got {shape}.")
    indices = (shape[0], *shape[2:])
    if tuple(targets.shape) not in (indices, shape):
        raise ValueError(
            f"The targets must be class indices of shape {indices} or class probabilities of shape {shape} to fit "
            f"outputs of shape {shape}, got {tuple(targets.shape)}."
        )


def index_targets(outputs: Any, targets: Any, metric: Any) -> Any:
    """Return the targets as class indices, if the outputs are class scores."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.is_floating_point()):
        return targets  # integers are predictions; other types are checked by the metric
    # `Dice` takes scores with or without the background.
    check_shapes(outputs, targets, num_classes=None if isinstance(metric, Dice) else metric.num_classes)
    if targets.shape != outputs.shape:
        return targets
    indices = targets.argmax(dim=1)
    ignore_index = getattr(metric, "ignore_index", None)
    return indices if ignore_index is None else torch.where(targets.any(dim=1), indices, ignore_index)
