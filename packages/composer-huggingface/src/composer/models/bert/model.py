"""BERT for masked language modeling and for classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from composer.metrics import BinaryF1Score, LanguageCrossEntropy, MaskedAccuracy
from composer.models.huggingface import HuggingFaceModel
from composer.models.huggingface._factories import Plan, build
from composer.utils import check_finite

_DEFAULT_NAME = "bert-base-uncased"


def create_bert_mlm(
    use_pretrained: bool = False,
    pretrained_model_name: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    tokenizer_name: str | None = None,
    gradient_checkpointing: bool = False,
) -> HuggingFaceModel:
    """Create a BERT for masked language modeling.

    By default it is BERT-base with new weights, which needs no network. Its metrics are `LanguageCrossEntropy` and
    `MaskedAccuracy`, in training and evaluation.

    Args:
        use_pretrained: Load pretrained weights.
        pretrained_model_name: A local folder written by `save_pretrained`, or a name on the Hugging Face Hub, for the
            configuration and the weights. None: `bert-base-uncased`.
        model_config: Values of the configuration to change, such as `{"num_hidden_layers": 4}`.
        tokenizer_name: A local folder or a name on the Hub. None: no tokenizer.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.

    Raises:
        ValueError: The tokenizer has more tokens than `vocab_size`, or `model_config` has an unknown entry.
        OSError: A name is neither a folder nor on the Hub.

    Example:
        >>> small = {
        ...     "hidden_size": 16,
        ...     "num_hidden_layers": 1,
        ...     "num_attention_heads": 2,
        ...     "intermediate_size": 32,
        ... }
        >>> sorted(create_bert_mlm(model_config=small).get_metrics(is_train=True))
        ['LanguageCrossEntropy', 'MaskedAccuracy']

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
        arXiv:1810.04805, section 3.1, task #1.
    """
    plan = Plan(_DEFAULT_NAME, transformers.BertConfig, transformers.BertForMaskedLM)
    model, tokenizer = build(
        plan, use_pretrained, pretrained_model_name, model_config, tokenizer_name, gradient_checkpointing
    )
    metrics = [LanguageCrossEntropy(ignore_index=-100), MaskedAccuracy(ignore_index=-100)]
    return HuggingFaceModel(model, tokenizer, use_logits=True, metrics=metrics)


def create_bert_classification(
    num_labels: int = 2,
    use_pretrained: bool = False,
    pretrained_model_name: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    tokenizer_name: str | None = None,
    gradient_checkpointing: bool = False,
) -> HuggingFaceModel:
    """Create a BERT that classifies sequences, or with `num_labels=1`, predicts a number for each.

    Batches have `labels` of shape (N,). Its metrics are `MulticlassAccuracy`, for two classes also `BinaryF1Score`, and
    for numbers `MeanSquaredError`, in training and evaluation. The classifier always has new weights.

    Args:
        num_labels: The number of classes; 1: labels are floating-point numbers.
        use_pretrained: Load pretrained weights.
        pretrained_model_name: A local folder or a name on the Hub; see `create_bert_mlm`.
        model_config: Values of the configuration to change.
        tokenizer_name: A local folder or a name on the Hub. None: no tokenizer.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.

    Raises:
        ValueError: See `create_bert_mlm`; or `num_labels` is less than 1, or differs in `model_config`.
        OSError: A name is neither a folder nor on the Hub.

    Example:
        >>> small = {
        ...     "hidden_size": 16,
        ...     "num_hidden_layers": 1,
        ...     "num_attention_heads": 2,
        ...     "intermediate_size": 32,
        ... }
        >>> sorted(create_bert_classification(model_config=small).get_metrics(is_train=False))
        ['BinaryF1Score', 'MulticlassAccuracy']

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
        arXiv:1810.04805, section 4.1.
    """
    check_finite("Use 1 to predict a number.", num_labels=num_labels, least=1)
    config = {"num_labels": num_labels, **(model_config or {})}
    if config["num_labels"] != num_labels:
        raise ValueError(
            f"`num_labels` is {num_labels}, but {config['num_labels']!r} in `model_config`. Remove the latter."
        )
    plan = Plan(_DEFAULT_NAME, transformers.BertConfig, transformers.BertForSequenceClassification)
    model, tokenizer = build(
        plan, use_pretrained, pretrained_model_name, config, tokenizer_name, gradient_checkpointing
    )
    if num_labels == 1:
        metrics: list[Any] = [MeanSquaredError()]
    else:
        # Validation would read the labels from the device in every step.
        metrics = [MulticlassAccuracy(num_classes=num_labels, average="micro", validate_args=False)]
        metrics += [BinaryF1Score()] if num_labels == 2 else []
    return HuggingFaceModel(model, tokenizer, use_logits=True, metrics=metrics)
