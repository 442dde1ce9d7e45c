"""The contract of all algorithms, for ChunkedCrossEntropy."""

from __future__ import annotations

from typing import Any

import torch

from composer.algorithms.chunked_cross_entropy import ChunkedCrossEntropy
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleTransformerModel


class TestChunkedCrossEntropy(AlgorithmContract):
    def make(self) -> ChunkedCrossEntropy:
        return ChunkedCrossEntropy(head_name="module.5")


class TestChunkedCrossEntropyOfLanguageModels(AlgorithmContract):
    def make(self) -> ChunkedCrossEntropy:
        return ChunkedCrossEntropy(head_name="head", label_smoothing=0.1, z_loss=0.01, chunk_size=7)

    def make_model(self) -> ComposerModel:
        return SimpleTransformerModel(vocab_size=16)

    def make_batches(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(7)
        batches = []
        for _ in range(4):
            tokens = torch.randint(0, 16, (8, 6), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, -2:] = -100
            batches.append({"input_ids": tokens, "labels": labels})
        return batches
