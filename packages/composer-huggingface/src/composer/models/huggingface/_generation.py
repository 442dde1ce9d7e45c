"""Text from a model, also from one that is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer.utils import dist, is_model_fsdp2

__all__ = ["generate", "generated_texts"]


def generate(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """Let the model of a `HuggingFaceModel` continue token ids; see `HuggingFaceModel.generate`."""
    tokenizer = model.tokenizer
    if "pad_token_id" not in kwargs and tokenizer is not None:
        pad = tokenizer.pad_token_id
        kwargs["pad_token_id"] = tokenizer.eos_token_id if pad is None else pad
    inner = model.model
    sharded = [module for module in (model, inner) if is_model_fsdp2(module)]
    if sharded:
        _gather_for_generate(inner)
        if dist.get_world_size() > 1:  # every rank goes on until the last is done
            kwargs.setdefault("synced_gpus", True)
    return inner.generate(input_ids=input_ids, **kwargs)


def _gather_for_generate(inner: Any) -> None:
    """Let `generate` have whole weights: it calls parts of the model without calling the model."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    if "generate" not in vars(inner):
        register_fsdp_forward_method(inner, "generate")


def generated_texts(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """What the model of a `HuggingFaceModel` continues the texts of a batch with.

    Raises:
        ValueError: There is no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("Generating texts needs a tokenizer. Pass `tokenizer` to `HuggingFaceModel`.")
    arguments = {"attention_mask": batch.get("attention_mask"), **batch.get("generation_kwargs", {})}
    if "generation_length" in batch:
        arguments["max_new_tokens"] = batch["generation_length"]
    tokens = model.generate(batch["input_ids"], **arguments)
    if not model.config.is_encoder_decoder:  # the prompt is repeated
        tokens = tokens[:, batch["input_ids"].shape[1] :]
    texts: list[str] = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts
