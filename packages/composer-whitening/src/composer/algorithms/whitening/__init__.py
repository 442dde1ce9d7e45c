"""Whitening: let the first convolution decorrelate the pixels, with filters from training images."""

from composer.algorithms.whitening.whitening import Whitening as Whitening
from composer.algorithms.whitening.whitening import WhiteningConv2d as WhiteningConv2d
from composer.algorithms.whitening.whitening import apply_whitening as apply_whitening
from composer.algorithms.whitening.whitening import compute_whitening_filters as compute_whitening_filters

__all__ = ["Whitening", "WhiteningConv2d", "apply_whitening", "compute_whitening_filters"]
