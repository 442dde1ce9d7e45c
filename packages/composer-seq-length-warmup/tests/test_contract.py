"""The contract of all algorithms, for SeqLengthWarmup."""

from __future__ import annotations

from typing import Any

import torch

from composer.algorithms.seq_length_warmup import SeqLengthWarmup
from composer.testing import AlgorithmContract, SimpleTransformerModel


class Language(AlgorithmContract):
    __test__ = False

    def make_model(self) -> SimpleTransformerModel:
        return SimpleTransformerModel()

    def make_batches(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(0, 32, (8, 17), generator=generator) for _ in range(4)]
        ones = torch.ones(8, 16, dtype=torch.int64)
        return [{"input_ids": t[:, :-1], "labels": t[:, 1:], "attention_mask": ones} for t in tokens]


class TestSeqLengthWarmup(Language):
    __test__ = True

    def make(self) -> SeqLengthWarmup:
        return SeqLengthWarmup(duration=0.75, min_seq_length=4, max_seq_length=16, step_size=4)


class TestReshaping(Language):
    __test__ = True

    def make(self) -> SeqLengthWarmup:
        return SeqLengthWarmup(duration=0.75, min_seq_length=4, max_seq_length=16, step_size=4, truncate=False)


class TestPreservedEnds(Language):
    __test__ = True

    def make(self) -> SeqLengthWarmup:
        return SeqLengthWarmup(0.75, 4, 16, 4, preserve_end_of_sequence=True)
