"""The contract of all algorithms, for GhostBatchNorm."""

from __future__ import annotations

from composer.algorithms.ghost_batchnorm import GhostBatchNorm
from composer.models import ComposerModel
from composer.testing import AlgorithmContract, SimpleConvModel


class TestGhostBatchNorm(AlgorithmContract):
    microbatch_reason = (
        "each microbatch is split into ghost batches and updates the running statistics, so several "
        "microbatches do not equal one batch"
    )

    def make(self) -> GhostBatchNorm:
        return GhostBatchNorm(ghost_batch_size=2)

    def make_model(self) -> ComposerModel:
        return SimpleConvModel(norm="batch")
