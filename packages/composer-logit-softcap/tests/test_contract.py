"""The contract of all algorithms, for LogitSoftcap."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from composer.algorithms.logit_softcap import LogitSoftcap
from composer.models import ComposerModel
from composer.testing import AlgorithmContract


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


class TestLogitSoftcap(AlgorithmContract):
    def make(self) -> LogitSoftcap:
        return LogitSoftcap(final=2.0, head_name="module.5")


class TestLogitSoftcapOfLanguageModels(AlgorithmContract):
    def make(self) -> LogitSoftcap:
        return LogitSoftcap(final=2.0, attention=1.0)

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

    def make_batches(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(0, 16, (8, 6), generator=generator) for _ in range(4)]
        return [{"input_ids": ids, "labels": ids.roll(-1, 1)} for ids in tokens]
