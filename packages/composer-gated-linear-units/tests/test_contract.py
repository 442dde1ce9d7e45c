"""The contract of all algorithms, for gated linear units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

from composer.algorithms.gated_linear_units import GatedLinearUnits
from composer.models import ComposerModel
from composer.testing import AlgorithmContract


class LanguageModel(ComposerModel):
    """A model of `transformers` on dicts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch["input_ids"]).logits
        return logits

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), batch["labels"])


class TestGatedLinearUnits(AlgorithmContract):
    def make(self) -> GatedLinearUnits:
        return GatedLinearUnits()

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
        )
        return LanguageModel(BertForMaskedLM(config))

    def make_batches(self) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        batches = (torch.randint(0, 32, (4, 8), generator=generator) for _ in range(4))
        return [{"input_ids": ids, "labels": ids.flip(1)} for ids in batches]


class TestGatedLinearUnitsWithBiases(TestGatedLinearUnits):
    def make(self) -> GatedLinearUnits:
        return GatedLinearUnits(act_fn=torch.relu, gated_layer_bias=True, non_gated_layer_bias=True)
