"""The contract of all algorithms, for Muon."""

from composer.algorithms.muon import Muon
from composer.testing import AlgorithmContract


class TestMuon(AlgorithmContract):
    def make(self) -> Muon:
        return Muon(lr=0.02)


class TestMuonWithOptions(TestMuon):
    def make(self) -> Muon:
        return Muon(lr=0.02, cautious=True, normalize=True, coefficients="polar_express", weight_decay=0.1)
