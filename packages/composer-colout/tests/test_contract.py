"""The contract of all algorithms, for ColOut."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from composer.algorithms.colout import ColOut
from composer.testing import AlgorithmContract


class Images(Dataset[Any]):
    """A data set with a transform."""

    transform = None

    def __len__(self) -> int:
        return 8


class TestColOut(AlgorithmContract):
    """Rows and columns are drawn before the batch is split, so microbatches equal one batch."""

    def make(self) -> ColOut:
        return ColOut(p_row=0.25)


class TestColOutOfEachImage(AlgorithmContract):
    def make(self) -> ColOut:
        return ColOut(batch=False)

    def make_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images())
