"""The contract of all algorithms, for LayerFreezing."""

from __future__ import annotations

from composer.algorithms.layer_freezing import LayerFreezing
from composer.testing import AlgorithmContract


class TestLayerFreezing(AlgorithmContract):
    """Its run is one epoch, which the test of resumption ends twice: at a half, when nothing is frozen yet."""

    def make(self) -> LayerFreezing:
        return LayerFreezing(freeze_start=0.5)
