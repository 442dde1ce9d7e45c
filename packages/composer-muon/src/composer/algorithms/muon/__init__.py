"""Muon: orthogonal updates for hidden matrices, at the learning rate of AdamW."""

from composer.algorithms.muon.muon import Muon as Muon
from composer.algorithms.muon.muon import build_muon as build_muon
from composer.algorithms.muon.optimizer import MuonOptimizer as MuonOptimizer
from composer.algorithms.muon.optimizer import orthogonalize_matrix as orthogonalize_matrix
from composer.algorithms.utils.hidden_matrices import HiddenMatrices as MuonSplit
from composer.algorithms.utils.hidden_matrices import HiddenMatrix as MuonMatrix
from composer.algorithms.utils.hidden_matrices import find_hidden_matrices as split_muon_parameters

__all__ = [
    "Muon",
    "MuonMatrix",
    "MuonOptimizer",
    "MuonSplit",
    "build_muon",
    "orthogonalize_matrix",
    "split_muon_parameters",
]
