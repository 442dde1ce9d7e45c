"""Muon: orthogonal updates for hidden matrices, at the learning rate of AdamW."""

from composer.algorithms.muon.muon import Muon as Muon
from composer.algorithms.muon.muon import build_muon as build_muon
from composer.algorithms.muon.optimizer import MuonOptimizer as MuonOptimizer
from composer.algorithms.muon.optimizer import orthogonalize_matrix as orthogonalize_matrix
from composer.algorithms.muon.split import MuonMatrix as MuonMatrix
from composer.algorithms.muon.split import MuonSplit as MuonSplit
from composer.algorithms.muon.split import split_muon_parameters as split_muon_parameters

__all__ = [
    "Muon",
    "MuonMatrix",
    "MuonOptimizer",
    "MuonSplit",
    "build_muon",
    "orthogonalize_matrix",
    "split_muon_parameters",
]
