"""Hyperball: hidden matrices keep the norms of their initialization, and move by an angle."""

from composer.algorithms.hyperball.hyperball import Hyperball as Hyperball
from composer.algorithms.hyperball.hyperball import apply_hyperball as apply_hyperball
from composer.algorithms.hyperball.hyperball import matrix_norms as matrix_norms

__all__ = ["Hyperball", "apply_hyperball", "matrix_norms"]
