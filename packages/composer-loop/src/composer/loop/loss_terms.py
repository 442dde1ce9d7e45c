"""The weights of microbatches and ranks, with which their gradients add up to those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from composer.algorithms.utils.logits import shifts_labels
from composer.core.data_spec import DataSpec
from composer.loss.utils import check_for_index_targets, class_weights_of, ignored_label, loss_setting
from composer.utils.batch_helpers import batch_get, find_part

Count: TypeAlias = float | torch.Tensor
"""A number, or a tensor on an accelerator, which is not read because that would wait for the device."""


class LossTerms:
    """Counts the terms of the mean that a loss computes over a batch: the weight of a microbatch or a rank.

    If the labels are class indices and the loss says which index it ignores, the terms are the labels with other
    indices, or the sum of the class weights of these labels. A model that shifts labels to the next token (with
    `shift_labels`, or a causal language model of transformers) does not use the first label of each row. Otherwise the
    terms are the samples.

    If the loss does not say which index it ignores, but some labels on the host are -100, the terms are the samples
    times the fraction of other labels, with a warning.

    Args:
        model: The model, or a module whose loss is computed elsewhere.
        spec: Counts samples and tokens.
        by_tokens: Count the loss-generating tokens of `get_num_tokens_in_batch`, if the user has given that function,
            and the tokens of a batch without labels instead of the samples.

    Attributes:
        is_sum: The loss is a sum, so that every microbatch has the weight 1, and gradients of ranks are averaged.
    """

    def __init__(self, model: torch.nn.Module, spec: DataSpec, by_tokens: bool = False) -> None:
        self._model, self._spec, self._by_tokens = model, spec, by_tokens
        functions = (getattr(model, "loss_fn", None), getattr(model, "_loss_fn", None), vars(model).get("loss"))
        function = next(filter(callable, functions), None)
        # A user's `loss` method may divide what its `loss_fn` returns by anything.
        is_returned = getattr(getattr(type(model), "loss", None), "__module__", "").startswith("composer.")
        reduction = loss_setting(function, "reduction") if is_returned else None
        self.is_sum = reduction == "sum"
        self._is_mean = reduction in ("mean", None)
        self._ignored = ignored_label(model if function is None else function)
        self._class_weights = class_weights_of(function) if is_returned and self._ignored is not None else None
        self._shifts = shifts_labels(model)
        self._has_warned = False

    def count(self, batch: Any) -> Count:
        """Return the number of terms for a batch or microbatch.

        Args:
            batch: The batch, before it moves to the device.

        Raises:
            ValueError: Tokens are requested, and their number is unknown.
        """
        if self._by_tokens and self._spec.has_token_counter:
            return self._spec.get_num_tokens_in_batch(batch, token_type="loss_generating")
        labels = self._labels(batch)
        if labels is None and not (self._by_tokens and self._is_mean):
            return self._spec.get_num_samples_in_batch(batch)
        if labels is None:
            tokens = self._spec.get_num_tokens_in_batch(batch)
            if not tokens and self._spec.get_num_samples_in_batch(batch):
                raise ValueError(
                    "`accumulate_train_batch_on_tokens=True` needs the number of tokens, but the batch has no class "
                    "indices as labels and is not a dict with 'input_ids'. Pass "
                    "`train_dataloader=DataSpec(dataloader, get_num_tokens_in_batch=...)`, or leave the argument out."
                )
            return tokens
        ignored, limits = -100 if self._ignored is None else self._ignored, torch.iinfo(labels.dtype)
        counted = labels != ignored if limits.min <= ignored <= limits.max else torch.ones_like(labels)
        if self._class_weights is None:
            number = counted.sum()
        else:
            index, weights = labels.masked_fill(counted == 0, 0).long(), self._class_weights
            number = (weights[index.to(weights.device, non_blocking=True)] * counted.to(weights.device)).sum()
        if number.device.type != "cpu":
            return number
        count_on_host: float = number.item()
        if self._ignored is not None or self._by_tokens:
            return count_on_host
        samples = self._spec.get_num_samples_in_batch(batch)
        if count_on_host == labels.numel():
            return samples
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "`loss` must say which labels it ignores, for microbatches and ranks to be weighted by the others. "
                "It does not, so labels of -100 do not count. Give the loss an attribute `ignore_index`.",
                stacklevel=2,
            )
        return samples * count_on_host / labels.numel()

    def _labels(self, batch: Any) -> torch.Tensor | None:
        """Return the class indices that the mean is over; None if there are none, or they cannot be counted."""
        if not self._is_mean:
            return None
        key = getattr(self._model, "target_key", None)
        key = find_part(batch, "target") if key is None else key
        try:
            labels = None if key is None else batch_get(batch, key)
        except (AttributeError, LookupError, TypeError, ValueError):  # `microbatch_transforms` may make the targets
            return None
        if not isinstance(labels, torch.Tensor) or not labels.dim() or not check_for_index_targets(labels):
            return None
        if self._ignored is None and (labels.device.type != "cpu" or hasattr(self._model, "ignore_index")):
            return None  # on an accelerator they would have to be read; `ignore_index=None` says that none is ignored
        return labels[:, 1:] if self._shifts and labels.dim() > 1 else labels


def share_of(count: Count, total: Count) -> Count:
    """Return the weight of a microbatch: `count / total`; 0 if both are 0.

    Args:
        count: The terms of the microbatch.
        total: Those of the batch, averaged over ranks.
    """
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, count / total, 0.0)
    return count / total if count else 0.0


def weighted(loss: torch.Tensor, weight: Count, outputs: Any = None) -> torch.Tensor:
    """Multiply a loss by the weight of its microbatch.

    A mean over no terms is NaN, and its gradients stay NaN when multiplied by 0. With a weight of 0 the result is 0,
    and gradients with respect to the outputs are set to 0, so that all ranks still run the backward pass.

    Args:
        loss: The loss of the microbatch.
        weight: The weight.
        outputs: The outputs of the model, from which the loss was computed.
    """

    def keep(value: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return torch.where(weight > 0, value, torch.zeros_like(value))
        return value if weight else (value * 0.0).nan_to_num()

    if isinstance(weight, torch.Tensor) or not weight:
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(keep)  # type: ignore[no-untyped-call]
    return keep(loss * weight)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over all tensors in nested mappings, sequences and objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for part in vars(value).values():
            yield from (part,) if isinstance(part, torch.Tensor) else ()
