"""`smooth_labels` and the algorithm `LabelSmoothing`. Symbols: smoothing s, number of classes C."""

from __future__ import annotations

from typing import Any

import torch

from composer.core import INTERPOLATES_LOSS, MIXES_TARGETS, SMOOTHS_TARGETS, Algorithm, Event, Placement, State
from composer.loggers import Logger
from composer.loss.utils import check_for_index_targets, infer_target_type
from composer.utils import check_finite, plain_number

__all__ = ["LabelSmoothing", "smooth_labels"]


def smooth_labels(logits: torch.Tensor, target: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    """Move class targets towards the uniform distribution: `(1 - s) * target + s / C`.

    Positions without a target are zero for every class: negative indices, and rows of zeros. In general, `s / C` is
    multiplied by the sum of the target of the position, up to 1. Smoothing and mixing targets (MixUp, CutMix) thus
    commute, also at ignored positions.

    Args:
        logits: Shape (N, C, ...). Only shape and dtype are used.
        target: Class indices, shape (N, ...), less than C; or one value per class, shape (N, C, ...). Not modified.
        smoothing: The weight s of the uniform distribution, in [0, 1].

    Returns:
        Shape (N, C, ...). Float64 if the values of the target (for indices: the logits) are, else float32.

    Raises:
        ValueError: `smoothing` is outside [0, 1], there are fewer than two classes, indices are not integers, or
            (checked on the CPU only) an index is C or more.
        RuntimeError: The shape matches neither form of target.

    Example:
        >>> smooth_labels(torch.zeros(2, 4), torch.tensor([3, -100]), smoothing=0.2)
        tensor([[0.0500, 0.0500, 0.0500, 0.8500],
                [0.0000, 0.0000, 0.0000, 0.0000]])

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section 7.
    Differs: positions without a target stay zero.
    """
    _check_smoothing(smoothing)
    _check_classes(logits)
    if infer_target_type(logits, target) == "indices":
        return _smooth_indices(logits, target, smoothing)
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    mass = target.sum(dim=1, keepdim=True).clamp_(max=1)
    return torch.add(mass.mul_(smoothing / logits.shape[1]), target, alpha=1 - smoothing)


def _smooth_indices(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Smooth class indices, without a one-hot tensor in between."""
    _check_labels(logits, labels)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    off_value = smoothing / logits.shape[1]
    on_value = 1 - smoothing + off_value
    index = labels.long().unsqueeze(1)
    # Otherwise, reading values would synchronize a device or break a graph.
    is_readable = index.device.type == "cpu" and not torch.compiler.is_compiling() and index.numel() > 0
    if is_readable and int(index.max()) >= logits.shape[1]:
        raise ValueError(
            f"`target` must hold class indices below {logits.shape[1]}, the number of classes, got {int(index.max())}. "
            f"To ignore positions, give them a negative index, such as -100."
        )
    if is_readable and int(index.min()) >= 0:
        return torch.full(logits.shape, off_value, dtype=dtype, device=logits.device).scatter_(1, index, on_value)
    counts = (index >= 0).to(dtype)
    return (counts * off_value).expand(logits.shape).contiguous().scatter_(1, index.clamp(min=0), counts * on_value)


def _check_classes(logits: torch.Tensor) -> None:
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"`logits` must have at least two classes in dimension 1, got shape {tuple(logits.shape)}. For a binary "
            f"classifier with one output, smooth the targets yourself: `target * (1 - smoothing) + smoothing / 2`."
        )


def _check_smoothing(smoothing: float) -> None:
    check_finite("0 does not change the targets, 1 makes them uniform.", smoothing=smoothing, least=0, most=1)


def _check_labels(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if not check_for_index_targets(labels):
        raise ValueError(f"`target` must hold integer class indices, got dtype {labels.dtype}. Convert with `.long()`.")
    if labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise RuntimeError(
            f"`target` must have the shape of `logits`, {tuple(logits.shape)}, with or without dimension 1, got "
            f"{tuple(labels.shape)}. Dimension 1 of the logits must be the classes."
        )


class LabelSmoothing(Algorithm):
    """Trains against targets that are moved towards the uniform distribution.

    At BEFORE_LOSS the targets of the batch become `(1 - s) * target + s / C`; at AFTER_LOSS the original targets are
    restored. Microbatches are smoothed one by one, which is the same as smoothing the batch.

    The loss must accept one value per class. `composer.loss.soft_cross_entropy` averages over the positions that have a
    target; `torch.nn.functional.cross_entropy` averages over all positions, and then ignores no index and does not
    divide by class weights.

    **Events** BEFORE_LOSS, AFTER_LOSS. **Reads** `state.outputs`, for the number of classes. **Writes** the targets.
    **Cost** one dense target tensor per microbatch; nothing is read from the device. **Compilation** static.

    Args:
        smoothing: The weight s of the uniform distribution, in [0, 1].
        target_key: Where the targets are in the batch; see `State.batch_get_item`.

    Attributes:
        original_labels: The original targets, between BEFORE_LOSS and AFTER_LOSS; otherwise None.

    Raises:
        ValueError: `smoothing` is outside [0, 1]; in training, see `smooth_labels`.
        TypeError: In training, if outputs or targets are not one tensor.

    Example:
        >>> LabelSmoothing(smoothing=0.1)
        LabelSmoothing(smoothing=0.1,target_key=1)

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section 7.
    Differs: positions without a target (negative indices, rows of zeros) stay without one.
    """

    events = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})
    # After methods that mix the targets; restored only after methods that compute another loss from them.
    placement = Placement(
        provides={SMOOTHS_TARGETS}, after={MIXES_TARGETS, INTERPOLATES_LOSS}, excludes={SMOOTHS_TARGETS}
    )

    def __init__(self, smoothing: float = 0.1, target_key: Any = 1) -> None:
        _check_smoothing(smoothing)
        self.smoothing = plain_number(smoothing)
        self.target_key = target_key
        self.original_labels: torch.Tensor | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the targets, or restore them."""
        if event is Event.BEFORE_LOSS:
            labels = state.batch_get_item(self.target_key)
            self._check_tensors(state.outputs, labels)
            self.original_labels = labels
            state.batch_set_item(self.target_key, smooth_labels(state.outputs, labels, self.smoothing))
        else:
            state.batch_set_item(self.target_key, self.original_labels)
            self.original_labels = None

    def _check_tensors(self, outputs: Any, labels: Any) -> None:
        if not isinstance(outputs, torch.Tensor):
            raise TypeError(
                f"`LabelSmoothing` reads the number of classes from the outputs, which must be one tensor, "
                f"got {type(outputs).__name__}. Return the logits from `forward`."
            )
        if not isinstance(labels, torch.Tensor):
            raise TypeError(
                f"`target_key` must be the position of a tensor of the batch, got {self.target_key!r}, which is a "
                f"{type(labels).__name__}. Pass the position of the targets."
            )
