"""The policies for BERT, RoBERTa and GPT-2 of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaSelfAttention

from composer.algorithms.alibi.attention_surgery_functions.attention import add_bias
from composer.algorithms.alibi.attention_surgery_functions.utils import (
    PolicyRegistry,
    zero_and_freeze_expand_position_embeddings,
)


def register(registry: PolicyRegistry) -> None:
    """Add the policies of this module to a registry."""
    registry.register(BertEmbeddings)(zero_bert_positions)
    registry.register(RobertaEmbeddings)(zero_roberta_positions)
    registry.register(BertSelfAttention, RobertaSelfAttention, GPT2Attention)(add_bias)
    registry.register(GPT2Model)(zero_gpt2_positions)


def zero_bert_positions(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    """Zero the position embeddings of BERT, for `max_sequence_length` tokens."""
    _resize(module, max_sequence_length)
    return module


def zero_roberta_positions(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    """Zero the position embeddings of RoBERTa, whose positions start at `padding_idx + 1`."""
    layer: Any = module
    _resize(module, max_sequence_length + layer.padding_idx + 1)
    return module


def _resize(layer: Any, length: int) -> None:
    zero_and_freeze_expand_position_embeddings(layer, length, "position_embeddings")
    # Both are buffers, and stay buffers when assigned. Token types are looked up by position if a batch has none.
    layer.position_ids = torch.arange(length, device=layer.position_ids.device)[None]
    layer.token_type_ids = layer.token_type_ids.new_zeros(1, length)


def zero_gpt2_positions(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    """Zero the position embeddings of GPT-2."""
    zero_and_freeze_expand_position_embeddings(module, max_sequence_length, "wpe")
    return module
