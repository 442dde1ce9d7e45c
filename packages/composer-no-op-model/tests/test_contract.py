"""The contract of all algorithms, for NoOpModel."""

from __future__ import annotations

from composer.algorithms.no_op_model import NoOpModel
from composer.testing import AlgorithmContract


class TestNoOpModel(AlgorithmContract):
    tolerance = 1e-6  # the parameter is float32 whatever the model is

    def make(self) -> NoOpModel:
        return NoOpModel()
