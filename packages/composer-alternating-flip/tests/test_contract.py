"""The contract of all algorithms, for AlternatingFlip."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms.alternating_flip import AlternatingFlip
from composer.testing import AlgorithmContract


class TestAlternatingFlip(AlgorithmContract):
    def make(self) -> AlternatingFlip:
        return AlternatingFlip(seed=7)

    def make_dataloader(self) -> Iterable[Any]:
        images, targets = (torch.cat(column) for column in zip(*self.make_batches(), strict=True))
        return DataLoader(TensorDataset(images, targets), batch_size=8)
