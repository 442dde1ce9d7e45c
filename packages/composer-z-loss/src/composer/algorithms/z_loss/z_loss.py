"""`compute_z_loss` and the algorithm `ZLoss`. Symbols: coefficient c, logits x, log Z = logsumexp(x) over classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.logits import add_to_loss, labels_and_mask, logits_of, shifts_labels
from composer.core import ADDS_LOSS, INTERPOLATES_LOSS, REPLACES_LOSS, REPLACES_MODEL, Algorithm, Event, Placement
from composer.loss.utils import check_for_index_targets, ignored_label
from composer.utils import check_finite, check_flags, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def compute_z_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    coefficient: float = 1e-4,
    *,
    mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    dim: int | None = None,
) -> torch.Tensor:
    """Return the z-loss `c * mean((log Z)^2)`, to be added to the cross-entropy of the same logits.

    It keeps the normalizer Z of the softmax close to 1, so that logits do not drift to large values, which are coarse
    in 16 bits. The mean is over the positions that count: those with a label and a nonzero mask. If there is none, the
    result is 0.

    Args:
        logits: Floating; the classes are in dimension `dim`, the other dimensions are positions. Not modified.
        labels: Class indices, one per position; `ignore_index` does not count. Or floating, one value per class in the
            shape of `logits`; rows of zeros do not count. None: all positions count. The labels of a language model
            must be shifted beforehand.
        coefficient: The weight c of the term, at least 0.
        mask: One value per position; zeros (False) do not count. None: all positions count.
        ignore_index: The label of positions that do not count.
        dim: The dimension of the classes: the last or 1. None: the one that the shape of `labels` (or `mask`) lacks. If
            that may be either, it is the last one for logits of up to three dimensions, as of language models, else 1.

    Returns:
        A scalar: float64 if the logits are, else float32.

    Raises:
        ValueError: `coefficient` is negative, or the shape of `labels` or `mask` does not match that of `logits`.

    Example:
        >>> compute_z_loss(torch.zeros(2, 4), torch.tensor([3, -100]), coefficient=1.0)  # log(4) ** 2
        tensor(1.9218)

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311, section 5.
    Differs: none.
    """
    _check_coefficient(coefficient)
    total, count = _sum_of_squares(logits, labels, mask, ignore_index, dim)
    return coefficient * (total / count.clamp(min=1))


def _sum_of_squares(
    logits: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor | None, ignore_index: int, dim: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of (log Z)^2 over the positions that count, and their number."""
    is_dense = labels is not None and labels.shape == logits.shape and not check_for_index_targets(labels)
    if dim is None:
        dim = _class_dim(logits, mask if is_dense or labels is None else labels)
    # In fp16 squares overflow, and in bf16 they have three digits.
    log_z = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(dim)
    counts = torch.ones_like(log_z, dtype=torch.bool)
    if labels is not None:
        has_label = (labels != 0).any(dim) if is_dense else labels != ignore_index
        counts = counts & _checked("labels", has_label, log_z, dim)
    if mask is not None:
        counts = counts & _checked("mask", mask != 0, log_z, dim)
    return torch.where(counts, log_z, 0).square().sum(), counts.sum(dtype=log_z.dtype)


def _class_dim(logits: torch.Tensor, reference: torch.Tensor | None) -> int:
    """Return -1 or 1: the dimension of the classes, by the shape of a tensor with one value per position."""
    order = (-1, 1) if logits.dim() <= 3 else (1, -1)
    if reference is None:
        return order[0]
    return next((dim for dim in order if reference.shape == logits.movedim(dim, 0).shape[1:]), order[0])


def _checked(name: str, values: torch.Tensor, log_z: torch.Tensor, dim: int) -> torch.Tensor:
    if values.shape != log_z.shape:
        raise ValueError(
            f"`{name}` must have one value per position, shape {tuple(log_z.shape)} if dimension {dim} of the logits "
            f"are the classes, got {tuple(values.shape)}. Select the logits of the labeled positions, or pass `dim`."
        )
    return values


class ZLoss(Algorithm):
    """Adds a term to the loss that keeps the normalizer of the softmax close to 1.

    At BEFORE_BACKWARD `compute_z_loss` of the logits and labels of the microbatch is added to the loss. If the loss is
    a mapping or a sequence, the term is added to its entry "total" or appended.

    The outputs of the model are the logits, or a mapping or object with `logits`, or a tuple whose first tensor with at
    least two dimensions holds the logits. With `shift_labels`, logits at a token are compared with the next label.

    The term is a mean over the positions of the microbatch that count, like the loss itself. Several microbatches or
    ranks equal one batch if the loop weights them by these positions, as the Trainer and `HostedRun` do.

    **Events** BEFORE_TRAIN_BATCH, BEFORE_BACKWARD, AFTER_TRAIN_BATCH. **Reads** `state.outputs`, the labels and the
    mask of the batch. **Writes** `state.loss`. **Cost** one logsumexp of the logits in float32, and its gradient in the
    backward pass; nothing is read from the device. **Compilation** static: it runs outside of the model.

    **Logs** the metrics `z_loss/loss`, the term, and `z_loss/mean_squared_log_z`, both over the whole batch of this
    rank. `loss/train/total` includes the term.

    **When not to use it** the loss is not a softmax cross-entropy: for example, binary cross-entropy of several labels.

    Args:
        coefficient: The weight c of the term, at least 0. 0 only logs.
        target_key: Position of the labels in the batch; see `State.batch_get_item`. None: 1, the targets.
        mask_key: Position of a mask in the batch, with zeros where tokens do not count. None: only labels decide.
        ignore_index: The label of positions that do not count. None: the one that the loss of the model ignores, or
            -100 if it does not say.
        shift_labels: Compare logits with the labels of the next tokens. None: as `shift_labels` of the model, which
            `HuggingFaceModel` has, and False for other models.
        dim: The dimension of the classes: the last or 1; see `compute_z_loss`.

    Raises:
        ValueError: `coefficient` is negative, or `dim` is neither -1 nor 1; in training, if labels are shifted but the
            logits have no dimension of tokens, and see `compute_z_loss`.
        TypeError: In training, if the outputs have no logits or the labels are not a tensor.

    Example:
        >>> ZLoss(coefficient=1e-3).coefficient
        0.001

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311, section 5.
    Differs: positions without a label do not count.
    """

    events = frozenset({Event.BEFORE_TRAIN_BATCH, Event.BEFORE_BACKWARD, Event.AFTER_TRAIN_BATCH})
    # BEFORE_BACKWARD is where losses are interpolated: there, the term is not mixed with them.
    placement = Placement(provides={ADDS_LOSS}, after={INTERPOLATES_LOSS}, excludes={REPLACES_LOSS, REPLACES_MODEL})

    def __init__(
        self,
        coefficient: float = 1e-4,
        target_key: Any = None,
        mask_key: Any = None,
        ignore_index: int | None = None,
        shift_labels: bool | None = None,
        dim: int | None = None,
    ) -> None:
        _check_coefficient(coefficient)
        if ignore_index is not None:
            check_integers(ignore_index=ignore_index)
        if shift_labels is not None:
            check_flags(shift_labels=shift_labels)
        if dim is not None:
            check_integers(dim=dim)
        if dim not in (None, -1, 1):
            raise ValueError(f"`dim` must be -1, 1 or None, got {dim!r}. Use -1 for the logits of a language model.")
        self.coefficient = plain_number(coefficient)
        self.target_key, self.mask_key = target_key, mask_key
        self.ignore_index = None if ignore_index is None else plain_number(ignore_index)
        self.shift_labels, self.dim = shift_labels, dim
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # sum and count of each microbatch, on the device

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Add the term to the loss of the microbatch, or log that of the batch."""
        if event is Event.BEFORE_TRAIN_BATCH:
            self._parts = []  # a pass that ran out of memory is repeated
        elif event is Event.BEFORE_BACKWARD:
            ignored = ignored_label(state.model) if self.ignore_index is None else self.ignore_index
            inputs = self._inputs(state)
            total, count = _sum_of_squares(*inputs, -100 if ignored is None else ignored, self.dim)
            self._parts.append((total.detach(), count))
            state.loss = add_to_loss(state.loss, self.coefficient * (total / count.clamp(min=1)), "z_loss")
        elif self._parts:
            totals, counts = zip(*self._parts, strict=True)
            mean = sum(totals[1:], totals[0]) / sum(counts[1:], counts[0]).clamp(min=1)
            self._parts = []
            logger.log_metrics({"z_loss/loss": self.coefficient * mean, "z_loss/mean_squared_log_z": mean})

    def _inputs(self, state: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return logits, labels and mask, shifted to the same positions."""
        logits = logits_of(state.outputs, "ZLoss")
        labels, mask = labels_and_mask(state, self.target_key, self.mask_key)
        if shifts_labels(state.model, self.shift_labels):
            if logits.dim() < 3:
                raise ValueError(
                    f"`shift_labels` must be False for logits without a dimension of tokens, got True with logits of "
                    f"shape {tuple(logits.shape)}. Pass `shift_labels=False`, or return logits of shape "
                    f"(batch, tokens, classes) from `forward`."
                )
            logits, labels, mask = logits[:, :-1], labels[:, 1:], None if mask is None else mask[:, 1:]
        return logits, labels, mask


def _check_coefficient(coefficient: float) -> None:
    check_finite("The paper uses 1e-4.", coefficient=coefficient, least=0)
