"""The policies for GPT-2."""

from __future__ import annotations

from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model

from composer.algorithms.alibi.attention_surgery_functions._attention import add_bias
from composer.algorithms.alibi.attention_surgery_functions.utils import (
    PolicyRegistry,
    zero_and_freeze_expand_position_embeddings,
)

__all__ = ["register"]


def register(registry: PolicyRegistry) -> None:
    """Add the policies of this module to a registry."""
    registry.register(GPT2Model)(zero_gpt2_positions)
    registry.register(GPT2Attention)(add_bias)


def zero_gpt2_positions(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    """Zero the position embeddings of GPT-2."""
    zero_and_freeze_expand_position_embeddings(module, max_sequence_length, "wpe")
    return module
