"""The contract of all algorithms, for ColOut."""

from __future__ import annotations

from composer.algorithms.colout import ColOut
from composer.testing import AlgorithmContract, DatasetTransformContract


class TestColOut(AlgorithmContract):
    """Rows and columns are drawn before the batch is split, so microbatches equal one batch."""

    def make(self) -> ColOut:
        return ColOut(p_row=0.25)


class TestColOutOfEachImage(DatasetTransformContract):
    def make(self) -> ColOut:
        return ColOut(batch=False)
