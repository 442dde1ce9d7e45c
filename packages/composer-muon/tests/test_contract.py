"""The contract of all algorithms, for Muon."""

from composer.algorithms.muon import Muon
from composer.testing import AlgorithmContract


class TestMuon(AlgorithmContract):
    def make(self) -> Muon:
        return Muon(lr=0.02)


class TestMuonWithOptions(TestMuon):
    def make(self) -> Muon:
        return Muon(lr=0.02, cautious=True, normalize=True, coefficients="polar_express", weight_decay=0.1)


class TestMuonWithSeveralMomenta(TestMuon):
    def make(self) -> Muon:
        momenta, weights = (0.85, 0.98), (0.4385, 0.5615)
        return Muon(lr=0.02, momentum=momenta, momentum_weights=weights, momentum_start="0.5dur", row_floor=0.3825)
