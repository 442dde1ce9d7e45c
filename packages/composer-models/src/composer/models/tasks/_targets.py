"""Checks and conversion of classification targets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composer.models.module_with_loss import most_probable


def check_tensors(outputs: Any, targets: Any) -> None:
    """Raise a TypeError unless outputs and targets are tensors."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        return
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"The {name} must be a tensor for the default loss function, got {type(value).__name__}. "
                "Pass a `loss_fn` that takes them."
            )


def check_shapes(outputs: Tensor, targets: Tensor, num_classes: int | None = None) -> None:
    """Raise a ValueError unless targets fit the outputs: wrong shapes may broadcast to plausible, wrong numbers."""
    if num_classes is None and outputs.ndim == 2 and targets.shape == outputs.shape[:1]:
        return  # the usual case, in every step
    shape = tuple(outputs.shape)
    if len(shape) < 2 or (num_classes is not None and shape[1] != num_classes):
        raise ValueError(f"The outputs must have shape (N, {num_classes or 'C'}, ...), got {shape}.")
    indices = (shape[0], *shape[2:])
    if tuple(targets.shape) not in (indices, shape):
        raise ValueError(
            f"The targets must be class indices of shape {indices} or class probabilities of shape {shape} to fit "
            f"outputs of shape {shape}, got {tuple(targets.shape)}."
        )


def index_targets(outputs: Any, targets: Any, metric: Any, loss: Any) -> Any:
    """Return the targets as class indices for a metric, if the outputs are class scores."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.is_floating_point()):
        return targets  # integers are predictions; other types are checked by the metric
    from composer.metrics import Dice

    # `Dice` takes scores with or without the background.
    check_shapes(outputs, targets, num_classes=None if isinstance(metric, Dice) else metric.num_classes)
    return targets if targets.shape != outputs.shape else most_probable(targets, metric, loss)
