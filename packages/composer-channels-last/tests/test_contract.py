"""The contract of all algorithms, for ChannelsLast."""

from __future__ import annotations

from composer.algorithms.channels_last import ChannelsLast
from composer.testing import AlgorithmContract


class TestChannelsLast(AlgorithmContract):
    def make(self) -> ChannelsLast:
        return ChannelsLast()
