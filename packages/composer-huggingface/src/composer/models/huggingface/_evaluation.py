"""Inputs of metrics: logits and labels; and the loss for labels that were replaced after the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers

log = logging.getLogger(__name__)

_IGNORE_INDEX = -100


def named(metrics: Any) -> dict[str, Any]:
    """Return metrics by the names of their classes.

    Args:
        metrics: A metric, a sequence, a mapping from names, or None.

    Raises:
        ValueError: Two metrics have the same class.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and not isinstance(metrics, torch.nn.Module):
        return dict(metrics)
    several = metrics if isinstance(metrics, Sequence) else [metrics]
    by_name = {type(metric).__name__: metric for metric in several}
    if len(by_name) < len(several):
        raise ValueError(
            f"`metrics` must not have two of one class, got {[type(metric).__name__ for metric in several]}. Give them "
            f"names: `metrics={{'a': ..., 'b': ...}}`."
        )
    return by_name


def resolve_shift_labels(model: Any, shift_labels: bool | None) -> bool:
    """Return `shift_labels`, or if it is None, whether the model is a causal language model."""
    from transformers.models.auto import modeling_auto

    listed = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    mapping = transformers.AutoModelForCausalLM._model_mapping
    registered = tuple(getattr(mapping, "_extra_content", {}).values())  # classes that the user has registered
    is_causal = isinstance(model, registered) or any(
        kind.__name__ in listed and kind.__module__.startswith("transformers.") for kind in type(model).__mro__
    )
    if shift_labels is False and is_causal:
        log.warning(
            "`shift_labels=False` for a causal language model: its metrics compare each token with itself, unless the "
            "labels in the batches are shifted, which its loss does not expect."
        )
    return is_causal if shift_labels is None else shift_labels


def labels_of(batch: Any, required: bool) -> Any:
    """Return the labels in a batch, or None.

    Raises:
        ValueError: They are required, and there are none.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None and required:
        found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"A batch must have 'labels' for metrics to compare with, got {found}. Add them, or use no metrics."
        )
    return labels


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return labels shifted to the left by one, with -100 at the end.

    Args:
        labels: Shape (N, S), integers; not modified.

    Example:
        >>> next_tokens(torch.tensor([[1, 2, 3]]))
        tensor([[   2,    3, -100]])
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORE_INDEX)


def without_labels(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return a batch for a forward pass without a loss; an encoder-decoder gets decoder inputs from the labels."""
    rest = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return rest


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits in a model's outputs. A single class loses its dimension: (N, 1) becomes (N)."""
    logits: torch.Tensor
    if isinstance(outputs, Mapping):
        logits = outputs["logits"]
    else:
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return logits.squeeze(1) if logits.ndim == 2 and logits.shape[1] == 1 else logits


def are_replaced(seen: Any, labels: Any) -> bool:
    """Return True if the labels of a batch differ from those of the forward pass."""
    if labels is seen or not (isinstance(seen, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return False
    # Sharding in mixed precision casts floating-point labels for `forward`.
    return not (seen.is_floating_point() and labels.is_floating_point() and seen.dtype != labels.dtype)


def loss_of_labels(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function of logits and labels of a classifier of `transformers`.

    Labels of examples may be class probabilities, shape (N, C), also if the model is trained on class indices.

    Raises:
        NotImplementedError: The model is not such a classifier, or has a custom `forward`.
    """
    kind = getattr(model, "loss_type", None)
    known = kind in ("ForSequenceClassification", "ForImageClassification", "ForTokenClassification")
    if not known or not type(model).forward.__module__.startswith("transformers."):
        raise NotImplementedError(
            f"The labels were replaced after the forward pass, in which `{type(model).__name__}` computes its loss. A "
            f"new loss is only supported for classifiers of `transformers`. Override `HuggingFaceModel.loss` in a "
            f"subclass to compute it from `outputs` and the labels in the batch, or remove the algorithm that replaces "
            f"labels."
        )

    def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model.loss_function(logits, labels, model.config)
        return loss

    def of_examples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        one_class = model.config.problem_type == "single_label_classification"
        if one_class and labels.is_floating_point():
            return torch.nn.functional.cross_entropy(logits, labels.to(logits.dtype))
        loss: torch.Tensor = model.loss_function(labels, logits, model.config)
        return loss

    return of_tokens if kind == "ForTokenClassification" else of_examples
