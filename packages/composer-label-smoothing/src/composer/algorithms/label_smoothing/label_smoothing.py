"""`smooth_labels` and the algorithm `LabelSmoothing`. Symbols: smoothing s, number of classes C."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import INTERPOLATES_LOSS, MIXES_TARGETS, SMOOTHS_TARGETS, Algorithm, Event, Placement
from composer.loss.loss import is_mean_of_classes, is_multi_label
from composer.loss.utils import class_weights_of, dense_targets, ignored_label, infer_target_type, loss_setting
from composer.utils import check_finite, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def smooth_labels(
    logits: torch.Tensor,
    target: torch.Tensor,
    smoothing: float = 0.1,
    *,
    ignore_index: int = -100,
    multi_label: bool = False,
    rescale: bool = False,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move class targets towards the uniform distribution: `(1 - s) * target + s / C`.

    Positions without a target are zero for every class: negative indices, `ignore_index`, and rows of zeros. In
    general, `s / C` is multiplied by the sum of the target of the position. Smoothing and mixing targets (MixUp,
    CutMix) thus commute, also at ignored positions.

    Args:
        logits: Shape (N, C, ...). Only shape and dtype are used.
        target: Class indices, shape (N, ...), less than C; or one value per class, shape (N, C, ...). Not modified.
        smoothing: The weight s of the uniform distribution, in [0, 1].
        ignore_index: The index that the loss ignores.
        multi_label: True if an example may have any number of labels, and each is a problem of two classes, as for
            `torch.nn.BCEWithLogitsLoss`: the result is `(1 - s) * target + s / 2`. The target has the shape of the
            logits, which may be any.
        rescale: Multiply the result of indices so that the mean sum of a position is 1. The loss of
            `torch.nn.functional.cross_entropy`, which is a mean over all positions of dense targets, is then that of
            the indices with `label_smoothing` and `ignore_index`. `composer.loss.soft_cross_entropy` does without.
        class_weights: The `weight` of the loss, shape (C,), for `rescale`.

    Returns:
        Shape (N, C, ...). Float64 if the values of the target (for indices: the logits) are, else float32.

    Raises:
        ValueError: `smoothing` is outside [0, 1], there are fewer than two classes, indices are not integers, or
            (checked on the CPU only) an index is C or more; or with `multi_label` the shapes differ.
        RuntimeError: The shape matches neither form of target.

    Example:
        >>> smooth_labels(torch.zeros(2, 4), torch.tensor([3, -100]), smoothing=0.2)
        tensor([[0.0500, 0.0500, 0.0500, 0.8500],
                [0.0000, 0.0000, 0.0000, 0.0000]])

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section 7.
    Differs: positions without a target stay zero. The paper has no multi-label targets.
    """
    _check_smoothing(smoothing)
    if multi_label:
        if logits.shape != target.shape:
            raise ValueError(
                f"`target` must have the shape of `logits`, {tuple(logits.shape)}, with `multi_label=True`, got "
                f"{tuple(target.shape)}. Pass one value per label."
            )
        return target.to(torch.promote_types(target.dtype, torch.float32)) * (1 - smoothing) + smoothing / 2
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"`logits` must have at least two classes in dimension 1, got shape {tuple(logits.shape)}. For a binary "
            f"classifier with one output, use `multi_label=True`."
        )
    if infer_target_type(logits, target) == "indices":
        if target.shape != logits.shape[:1] + logits.shape[2:]:
            raise RuntimeError(
                f"`target` must have the shape of `logits`, {tuple(logits.shape)}, with or without dimension 1, got "
                f"{tuple(target.shape)}. Dimension 1 of the logits must be the classes."
            )
        return dense_targets(
            target,
            logits.shape[1],
            smoothing=smoothing,
            ignore_index=ignore_index,
            rescale=rescale,
            class_weights=class_weights,
            dtype=torch.promote_types(logits.dtype, torch.float32),
        )
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    mass = target.sum(dim=1, keepdim=True)
    return torch.add(mass.mul_(smoothing / logits.shape[1]), target, alpha=1 - smoothing)


def _check_smoothing(smoothing: float) -> None:
    check_finite("0 does not change the targets, 1 makes them uniform.", smoothing=smoothing, least=0, most=1)


class LabelSmoothing(Algorithm):
    """Trains against targets that are moved towards the uniform distribution.

    At BEFORE_LOSS the targets of the batch become `(1 - s) * target + s / C`; at AFTER_LOSS the original targets are
    restored. Microbatches are smoothed one by one, which is the same as smoothing the batch.

    The loss must accept one value per class. Positions without a target, with a negative index or the `ignore_index` of
    the loss, do not count: the loss equals that of `torch.nn.functional.cross_entropy` with `label_smoothing`, also for
    a loss that averages dense targets over all positions, and with class weights.

    If the loss is one of torch's binary ones, such as `BCEWithLogitsLoss`, and the batch has floating targets, each
    label is smoothed by itself, to `(1 - s) * target + s / 2`. The loss is found in `loss_fn` of the model. With a
    model that only has a method `loss`, call `smooth_labels(..., multi_label=True)` there. Indices, and all targets of
    `composer.loss.binary_cross_entropy_with_logits`, stand for classes that exclude each other.

    **Events** INIT, BEFORE_FORWARD, BEFORE_LOSS, AFTER_LOSS. **Reads** the loss of the model, and `state.outputs`, for
    the number of classes. **Writes** the targets. **Cost** one dense target tensor per microbatch; nothing is read from
    the device. **Compilation** static.

    Args:
        smoothing: The weight s of the uniform distribution, in [0, 1].
        target_key: Where the targets are in the batch; see `State.batch_get_item`.

    Attributes:
        original_labels: The original targets, between BEFORE_LOSS and AFTER_LOSS; otherwise None.

    Raises:
        ValueError: `smoothing` is outside [0, 1]; in training, see `smooth_labels`.
        TypeError: In training, if outputs or targets are not one tensor.

    Warns:
        NotIntendedUseWarning: At INIT, if the loss smooths targets, too: its `label_smoothing` is not 0.

    Example:
        >>> LabelSmoothing(smoothing=0.1)
        LabelSmoothing(smoothing=0.1,target_key=1)

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section 7.
    Differs: positions without a target stay without one. The paper has no multi-label targets.
    """

    events = frozenset({Event.INIT, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS})
    # After methods that mix the targets; restored only after methods that compute another loss from them.
    placement = Placement(
        provides={SMOOTHS_TARGETS}, after={MIXES_TARGETS, INTERPOLATES_LOSS}, excludes={SMOOTHS_TARGETS}
    )

    def __init__(self, smoothing: float = 0.1, target_key: Any = 1) -> None:
        _check_smoothing(smoothing)
        self.smoothing = plain_number(smoothing)
        self.target_key = target_key
        self.original_labels: torch.Tensor | None = None
        self._is_multi_label = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the targets, or restore them."""
        if event is Event.INIT:
            _warn_of_double_smoothing(state.model)
        elif event is Event.BEFORE_FORWARD:  # later, indices may have been mixed to floating targets
            labels = state.batch_get_item(self.target_key)
            is_dense = isinstance(labels, torch.Tensor) and labels.is_floating_point()
            self._is_multi_label = is_dense and is_multi_label(state.model)
        elif event is Event.BEFORE_LOSS:
            labels = state.batch_get_item(self.target_key)
            self._check_tensors(state.outputs, labels)
            self.original_labels = labels
            ignored = ignored_label(state.model)
            smoothed = smooth_labels(
                state.outputs,
                labels,
                self.smoothing,
                ignore_index=-100 if ignored is None else ignored,
                multi_label=self._is_multi_label,
                rescale=is_mean_of_classes(state.model),
                class_weights=class_weights_of(state.model),
            )
            state.batch_set_item(self.target_key, smoothed)
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


def _warn_of_double_smoothing(model: torch.nn.Module) -> None:
    smoothing = loss_setting(model, "label_smoothing")
    if smoothing:
        warnings.warn(
            f"The loss has `label_smoothing={smoothing}` and smooths the targets of `LabelSmoothing` once more. Use "
            f"one of them.",
            NotIntendedUseWarning,
            stacklevel=2,
        )
