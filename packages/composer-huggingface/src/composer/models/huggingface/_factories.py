"""Construction of a model from a configuration, a local folder, or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers


@dataclass
class Plan:
    """A family of models.

    Attributes:
        default_name: The name of the model with the configuration `config_class()`.
        config_class: The class of the configuration.
        model_class: The class of the model.
    """

    default_name: str
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
    """Return a model and its tokenizer, or None; see `create_bert_mlm` for the arguments.

    Raises:
        ValueError: `overrides` has an entry that the configuration does not have.
    """
    changes = dict(overrides or {})
    known = plan.config_class()
    # `transformers` would store unknown entries and ignore them.
    unknown = [name for name in changes if not hasattr(known, name) and name not in ("attn_implementation", "dtype")]
    if unknown:
        raise ValueError(
            f"`model_config` must have entries of `{plan.config_class.__name__}`, got {', '.join(map(repr, unknown))}. "
            f"Check the spelling."
        )
    if use_pretrained:
        model = plan.model_class.from_pretrained(name or plan.default_name, **changes)
    elif name in (None, plan.default_name):  # the default configuration: nothing is downloaded
        model = plan.model_class(plan.config_class(**changes))
    else:
        model = plan.model_class(plan.config_class.from_pretrained(name, **changes))
    tokenizer = None if tokenizer_name is None else transformers.AutoTokenizer.from_pretrained(tokenizer_name)
    if gradient_checkpointing:
        recompute_activations(model)
    return model, tokenizer


def recompute_activations(model: Any) -> None:
    """Enable activation checkpointing."""
    # Earlier releases only have the second name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # The reentrant variant needs inputs that require gradients, and is not compatible with all of DDP.
    enable({"use_reentrant": False})
