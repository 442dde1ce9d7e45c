"""Functions that several metrics share. None of them reads a value from the device: checks only use shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_class_scores(
    scores: Tensor, targets: Tensor, *, dim: int, num_classes: int | None = None, at_most: int | None = None
) -> None:
    """Check that `targets` holds one class index for every set of class scores.

    Without the check, a target of a broadcastable shape would result in a plausible wrong number.

    Args:
        scores: Class scores; `dim` counts the classes.
        targets: Class indices, the shape of `scores` without `dim`.
        dim: 1 or -1.
        num_classes: The required number of classes; at least 2 if None.
        at_most: The largest number of classes instead: a model may have no output for the last ones.

    Raises:
        ValueError: A shape does not match.
    """
    layout = "(N, C, ...)" if dim == 1 else "(..., C)"
    if scores.ndim < 2:
        raise ValueError(f"The class scores must have shape {layout}, got {tuple(scores.shape)}.")
    classes = scores.shape[dim]
    if at_most is not None and not 1 <= classes <= at_most:
        raise ValueError(
            f"The class scores must have shape {layout} with at most {at_most} classes, got {tuple(scores.shape)}."
        )
    if num_classes is None and at_most is None and classes < 2:
        raise ValueError(
            f"The class scores must have shape {layout} with at least 2 classes, got {tuple(scores.shape)}. "
            "With a single score per example there is no predicted class."
        )
    if num_classes is not None and classes != num_classes:
        raise ValueError(
            f"The class scores must have shape {layout} with {num_classes} classes, got {tuple(scores.shape)}."
        )
    expected = [size for position, size in enumerate(scores.shape) if position != dim % scores.ndim]
    if list(targets.shape) != expected:
        raise ValueError(
            f"The targets must be class indices of shape {tuple(expected)} for scores of shape {tuple(scores.shape)}, "
            f"got {tuple(targets.shape)}."
        )


def confusion_matrix(preds: Tensor, targets: Tensor, num_classes: int, keep: Tensor | None = None) -> Tensor:
    """Count every pair of target and predicted class.

    `torch.bincount` would read its size from the device, and `torch.histc` has no deterministic CUDA kernel.

    Args:
        preds: Predicted classes in [0, num_classes), int64.
        targets: Target classes of the same shape, int64.
        num_classes: Number of classes C.
        keep: Mask of the elements to count, bool; all if None.

    Returns:
        Shape (C + 1, C), int64: rows are targets, columns predictions. The last row counts targets outside [0, C).
    """
    known = (targets >= 0) & (targets < num_classes)
    cells = torch.where(known, targets, num_classes) * num_classes + preds
    weights = torch.ones_like(cells) if keep is None else keep.long()
    counts = torch.zeros((num_classes + 1) * num_classes, dtype=torch.int64, device=preds.device)
    return counts.scatter_add_(0, cells.flatten(), weights.flatten()).view(num_classes + 1, num_classes)


def full_precision(scores: Tensor) -> Tensor:
    """Convert half-precision scores to float32: a sum of many losses needs more than 8 or 11 significant bits."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def logits_of(output: Tensor | Mapping[str, Any]) -> Tensor:
    """Return the logits of an output: the tensor itself, or the value of the key "logits" of a mapping.

    Raises:
        TypeError: `output` is neither a tensor nor a mapping.
        KeyError: The mapping has no key "logits".
    """
    if isinstance(output, Tensor):
        return output
    if not isinstance(output, Mapping):
        raise TypeError(f"`output` must be a tensor or a mapping with the key 'logits', got {type(output).__name__}.")
    if "logits" not in output:
        raise KeyError(f"`output` must have the key 'logits', got the keys {sorted(map(str, output))}.")
    logits: Tensor = output["logits"]
    return logits
