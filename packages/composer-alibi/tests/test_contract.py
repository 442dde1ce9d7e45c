"""The contract of all algorithms, for ALiBi."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from composer.algorithms.alibi import Alibi
from composer.models import ComposerModel
from composer.testing import AlgorithmContract


class LanguageModel(ComposerModel):
    """A model of `transformers` on dicts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), batch["labels"])


class TestAlibi(AlgorithmContract):
    def make(self) -> Alibi:
        return Alibi(max_sequence_length=24)

    def make_model(self) -> ComposerModel:
        config = GPT2Config(
            vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0
        )
        return LanguageModel(GPT2LMHeadModel(config))

    def make_batches(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        batches = []
        for _ in range(4):
            ids = torch.randint(0, 32, (4, 16), generator=generator)
            mask = torch.ones_like(ids)
            mask[:, -2:] = 0
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1)})
        return batches


class TestAlibiOfBert(TestAlibi):
    def make_model(self) -> ComposerModel:
        config = BertConfig(
            vocab_size=32,
            max_position_embeddings=8,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            attn_implementation="eager",
        )
        return LanguageModel(BertForMaskedLM(config))
