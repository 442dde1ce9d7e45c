"""The logits and labels of a batch, for algorithms that add to the loss or replace a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from composer.utils import unwrapped_model

if TYPE_CHECKING:
    from composer.core.state import State

# Algorithms ask in every step, and looking through a large model takes longer than the rest of what they do there.
_holds_causal: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def logits_of(outputs: Any, name: str) -> torch.Tensor:
    """Return the logits in the outputs of a model.

    Args:
        outputs: The logits; a mapping or object with `logits`; or a tuple or list, whose first tensor with at least two
            dimensions are the logits.
        name: The algorithm that needs them, for the message.

    Raises:
        TypeError: There are no logits.

    Example:
        >>> logits_of({"logits": torch.zeros(2, 3)}, "ZLoss").shape
        torch.Size([2, 3])
    """
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        logits = outputs.logits
    elif isinstance(outputs, (list, tuple)):
        logits = next((part for part in outputs if isinstance(part, torch.Tensor) and part.dim() > 1), None)
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"`{name}` needs logits: a tensor, a tuple with one, or a mapping or object with `logits`, got "
            f"{type(outputs).__name__}. Return the logits from `forward`."
        )
    return logits


def labels_and_mask(
    state: State, target_key: Any = None, mask_key: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the labels of the current batch, and its mask if `mask_key` is given.

    Args:
        state: The training state.
        target_key: Key of the labels; see `State.batch_get_item`. None: 1, the targets.
        mask_key: Key of the mask.

    Raises:
        TypeError: A value is not a tensor.
    """
    labels = _tensor_at(state, 1 if target_key is None else target_key, "target_key")
    return labels, None if mask_key is None else _tensor_at(state, mask_key, "mask_key")


def shifts_labels(model: torch.nn.Module, shift_labels: bool | None = None) -> bool:
    """Return True if the logits at each token predict the next label.

    Args:
        model: The model.
        shift_labels: The user's choice. None: the attribute of the model with this name; without it, whether a part of
            the model is a causal language model of transformers, whose own loss shifts.
    """
    if shift_labels is None:
        model = unwrapped_model(model)
        declared = getattr(model, "shift_labels", None)
        if declared is not None:
            return bool(declared)
        if model not in _holds_causal:
            _holds_causal[model] = any(map(_is_causal, model.modules()))
        return _holds_causal[model]
    return shift_labels


def _is_causal(module: torch.nn.Module) -> bool:
    return any(
        kind.__module__.startswith("transformers.") and kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))
        for kind in type(module).__mro__
    )


def add_to_loss(loss: Any, term: torch.Tensor, name: str) -> Any:
    """Add a term to a loss, which keeps the form that the model returned.

    Args:
        loss: A tensor; a mapping, to whose entry "total" the term is added; or a sequence, to which it is appended.
        term: A scalar.
        name: The key of the term in a mapping without a total.

    Raises:
        TypeError: The loss has another form.
    """
    if isinstance(loss, torch.Tensor):
        return loss + term
    if isinstance(loss, Mapping):
        key = "total" if "total" in loss else name
        return {**loss, key: add_to_loss(loss[key], term, name) if key in loss else term}
    if isinstance(loss, Sequence):
        return (*loss, term)
    raise TypeError(
        f"A loss must be a tensor, a mapping or a sequence, to add `{name}` to it, got {type(loss).__name__}."
    )


def _tensor_at(state: State, key: Any, argument: str) -> torch.Tensor:
    value = state.batch_get_item(key)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"`{argument}` must be the position of a tensor of the batch, got {key!r}, which is a "
            f"{type(value).__name__}. Pass the position of the labels as `target_key`, and of the mask as `mask_key`."
        )
    return value
