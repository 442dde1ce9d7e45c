"""The contract of all algorithms, for QKNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from composer.algorithms.qk_norm import QKNorm
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleTransformerModel


class LanguageModel(ComposerModel):
    """A model of `transformers` on dicts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), batch["labels"])


class TestQKNorm(AlgorithmContract):
    def make(self) -> QKNorm:
        return QKNorm(norm="layer", query_name="qkv", key_name="qkv", head_dim=8)

    def make_model(self) -> ComposerModel:
        return SimpleTransformerModel(vocab_size=16)

    def make_batches(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(0, 16, (8, 6), generator=generator) for _ in range(4)]
        return [{"input_ids": ids, "labels": ids.roll(-1, 1)} for ids in tokens]


class TestQKNormOfLlama(TestQKNorm):
    def make(self) -> QKNorm:
        return QKNorm()

    def make_model(self) -> ComposerModel:
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=0,
        )
        return LanguageModel(LlamaForCausalLM(config))


class TestQKNormOfGPT2(TestQKNormOfLlama):
    def make_model(self) -> ComposerModel:
        config = GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0
        )
        return LanguageModel(GPT2LMHeadModel(config))
