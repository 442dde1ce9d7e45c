"""What metrics are measured on, and against."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

__all__ = ["labels_of", "logits_of", "named", "next_tokens", "shifts", "without_labels"]

log = logging.getLogger(__name__)

_IGNORED = -100


def named(metrics: Any) -> dict[str, Any]:
    """Metrics by the names of their classes.

    Args:
        metrics: One, several, a mapping that names them, or None.

    Raises:
        ValueError: Two have one name.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and not isinstance(metrics, torch.nn.Module):
        return dict(metrics)
    several = metrics if isinstance(metrics, Sequence) else [metrics]
    found = {type(metric).__name__: metric for metric in several}
    if len(found) < len(several):
        raise ValueError(
            f"`metrics` must not have two of one class, got {[type(metric).__name__ for metric in several]}. Name "
            f"them: `metrics={{'a': ..., 'b': ...}}`."
        )
    return found


def shifts(model: Any, asked: bool | None) -> bool:
    """Whether the labels of a model are the next tokens.

    Args:
        model: A model of `transformers`.
        asked: What the user says; None: nothing.
    """
    is_causal = _is_causal(model)
    if asked is False and is_causal:
        log.warning(
            "`shift_labels=False` for a causal language model: its metrics compare each token with itself, unless the "
            "labels in the batches are shifted, which its loss does not expect."
        )
    return is_causal if asked is None else asked


def _is_causal(model: Any) -> bool:
    from transformers.models.auto import modeling_auto

    listed = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    mapping = transformers.AutoModelForCausalLM._model_mapping
    registered = tuple(getattr(mapping, "_extra_content", {}).values())  # of the user
    kinds = type(model).__mro__
    return any(kind.__name__ in listed and kind.__module__.startswith("transformers.") for kind in kinds) or (
        bool(registered) and isinstance(model, registered)
    )


def labels_of(batch: Any, required: bool) -> Any:
    """The labels in a batch.

    Raises:
        ValueError: They are required, and there are none.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None and required:
        raise ValueError(
            f"A batch must have 'labels' for metrics to compare with, got {_described(batch)}. Put them there, "
            f"or measure no metrics."
        )
    return labels


def _described(batch: Any) -> Any:
    return sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Labels shifted to the left, with what is ignored at the end.

    Args:
        labels: Shape (N, S), integers; not modified.

    Example:
        >>> next_tokens(torch.tensor([[1, 2, 3]]))
        tensor([[   2,    3, -100]])
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)


def without_labels(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A batch for a forward pass without a loss. An encoder-decoder gets what it would have made of the labels."""
    rest = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return rest


def logits_of(outputs: Any) -> torch.Tensor:
    """The logits among a model's outputs. Those of a single class lose its dimension: (N, 1) becomes (N)."""
    logits: torch.Tensor
    if isinstance(outputs, Mapping):
        logits = outputs["logits"]
    else:
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return logits.squeeze(1) if logits.ndim == 2 and logits.shape[1] == 1 else logits
