"""The contract of all algorithms, for RandAugment."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from composer.algorithms.randaugment import RandAugment
from composer.testing import AlgorithmContract


class Images(Dataset[Any]):
    """A data set with a transform."""

    transform = None

    def __len__(self) -> int:
        return 8


class TestRandAugment(AlgorithmContract):
    def make(self) -> RandAugment:
        return RandAugment(severity=5)

    def make_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images())
