"""What makes one model of a family: from a configuration, a local folder, or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from composer.models.huggingface._construction import recompute_activations

__all__ = ["Plan", "build"]


@dataclass
class Plan:
    """A family of models.

    Attributes:
        own_name: The name of the model that `config_class()` describes.
        config_class: Its configuration.
        model_class: The model.
    """

    own_name: str
    config_class: Any
    model_class: Any


def build(
    plan: Plan,
    use_pretrained: bool,
    name: str | None,
    overrides: Mapping[str, Any] | None,
    tokenizer_name: str | None,
    gradient_checkpointing: bool,
) -> tuple[Any, Any]:
    """A model and its tokenizer, if it has one; see `create_bert_mlm` for the arguments.

    Raises:
        ValueError: `overrides` has what the configuration does not.
    """
    changes = dict(overrides or {})
    _check_names(plan, changes)
    if use_pretrained:
        model = plan.model_class.from_pretrained(name or plan.own_name, **changes)
    elif name in (None, plan.own_name):  # which its class describes: nothing is downloaded
        model = plan.model_class(plan.config_class(**changes))
    else:
        model = plan.model_class(plan.config_class.from_pretrained(name, **changes))
    tokenizer = None if tokenizer_name is None else transformers.AutoTokenizer.from_pretrained(tokenizer_name)
    if gradient_checkpointing:
        recompute_activations(model)
    return model, tokenizer


def _check_names(plan: Plan, changes: Mapping[str, Any]) -> None:
    """`transformers` keeps a misspelled entry as it is, and ignores it."""
    known = plan.config_class()
    unknown = [name for name in changes if not hasattr(known, name) and name not in ("attn_implementation", "dtype")]
    if unknown:
        raise ValueError(
            f"`model_config` must have entries of `{plan.config_class.__name__}`, got {', '.join(map(repr, unknown))}. "
            f"Check the spelling."
        )
