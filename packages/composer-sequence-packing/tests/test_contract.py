"""The contract of all algorithms, for SequencePacking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from composer.algorithms.sequence_packing import SequencePacking
from composer.models import ComposerModel
from composer.testing import AlgorithmContract


class Attention(ComposerModel):
    """One layer of attention that predicts the next token."""

    shift_labels = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = torch.nn.Embedding(32, 16), torch.nn.Embedding(16, 16)
        self.query, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32)

    def forward(self, batch: Any) -> torch.Tensor:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        positions = batch.get("position_ids", torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embedding(tokens) + self.positions(positions)
        if mask.dim() == 2:
            mask = mask.bool()[:, None, None] & x.new_ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
        heads = x[:, None]
        logits: torch.Tensor = self.head(
            x + F.scaled_dot_product_attention(self.query(heads), heads, heads, attn_mask=mask)[:, 0]
        )
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


class TestSequencePacking(AlgorithmContract):
    def make(self) -> SequencePacking:
        return SequencePacking(length=16)

    def make_model(self) -> ComposerModel:
        return Attention()

    def make_batches(self) -> Sequence[Any]:
        """Sixteen documents of four tokens, which fill four rows, whose parts weigh the same."""
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(0, 32, (4, 16, 4), generator=generator)
        return [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens} for tokens in ids]
