"""GPT-2 for causal language modeling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from composer.metrics import LanguageCrossEntropy, LanguagePerplexity
from composer.models.huggingface import HuggingFaceModel
from composer.models.huggingface._factories import Plan, build


def create_gpt2(
    use_pretrained: bool = False,
    pretrained_model_name: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    tokenizer_name: str | None = None,
    gradient_checkpointing: bool = False,
) -> HuggingFaceModel:
    """Create a GPT-2 for causal language modeling.

    By default it is the smallest one of the paper, with new weights, which needs no network. Its metrics are
    `LanguageCrossEntropy` and `LanguagePerplexity`, in training and evaluation.

    Args:
        use_pretrained: Load pretrained weights.
        pretrained_model_name: A local folder written by `save_pretrained`, or a name on the Hugging Face Hub, for the
            configuration and the weights. None: `gpt2`.
        model_config: Values of the configuration to change, such as `{"n_layer": 4}`.
        tokenizer_name: A local folder or a name on the Hub. None: no tokenizer.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.

    Raises:
        ValueError: The tokenizer has more tokens than `vocab_size`, or `model_config` has an unknown entry.
        OSError: A name is neither a folder nor on the Hub.

    Example:
        >>> model = create_gpt2(model_config={"n_embd": 16, "n_layer": 1, "n_head": 2})
        >>> sorted(model.get_metrics(is_train=True))
        ['LanguageCrossEntropy', 'LanguagePerplexity']

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """
    plan = Plan("gpt2", transformers.GPT2Config, transformers.GPT2LMHeadModel)
    model, tokenizer = build(
        plan, use_pretrained, pretrained_model_name, model_config, tokenizer_name, gradient_checkpointing
    )
    model.loss_type = "ForCausalLM"  # the fallback of transformers, without its warning
    return HuggingFaceModel(model, tokenizer, use_logits=True, metrics=[LanguageCrossEntropy(), LanguagePerplexity()])
