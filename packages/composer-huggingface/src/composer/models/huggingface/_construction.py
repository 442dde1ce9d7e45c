"""What is done to a model of `transformers` before it is trained."""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ["fit_tokenizer", "in_place", "recompute_activations"]

log = logging.getLogger(__name__)


def in_place(model: Any) -> Any:
    """The model inside the wrapper of `torch.compile`, compiled as the wrapper is; its names have no prefix."""
    modules = getattr(model, "_modules", {})
    inner = modules.get("_orig_mod")
    if not isinstance(inner, torch.nn.Module):
        return model
    inner._compiled_call_impl = model.dynamo_ctx(inner._call_impl)  # what `torch.nn.Module.compile` sets
    return inner


def fit_tokenizer(model: Any, tokenizer: Any, allow_resizing: bool) -> None:
    """See to it that the model has an embedding for each token.

    Raises:
        ValueError: It has not, and must not be changed.
    """
    if tokenizer is None:
        log.warning(
            "There is no tokenizer, so checkpoints will not have it, and texts cannot be generated. Pass `tokenizer` "
            "to `HuggingFaceModel`."
        )
        return
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if size is None or len(tokenizer) <= size:
        return
    if not allow_resizing:
        raise ValueError(
            f"`tokenizer` must not have more tokens than the model has embeddings, got {len(tokenizer)} and {size}. "
            f"Pass `allow_embedding_resizing=True`, or build the model with `vocab_size={len(tokenizer)}`."
        )
    log.warning("The tokenizer has %d tokens: the model's %d embeddings grow to that.", len(tokenizer), size)
    model.resize_token_embeddings(len(tokenizer))


def recompute_activations(model: Any) -> None:
    """Let the backward pass compute the activations of each layer again, which saves memory."""
    # Earlier releases have the other name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # The reentrant kind needs inputs that require gradients, and does not work with all of DDP.
    enable({"use_reentrant": False})
