"""The contract of all algorithms, for BatchSizeWarmup."""

from __future__ import annotations

import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from composer.algorithms.batch_size_warmup import BatchSizeWarmup
from composer.testing import AlgorithmContract


class TestBatchSizeWarmup(AlgorithmContract):
    def make(self) -> BatchSizeWarmup:
        return BatchSizeWarmup(initial_batch_size=2, duration="16sp")

    def make_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(ConcatDataset([TensorDataset(*batch) for batch in self.make_batches()]), batch_size=8)
