"""SAM: find weights whose entire neighborhood has a low loss."""

from composer.algorithms.sam.sam import SAM as SAM
from composer.algorithms.sam.sam import SAMOptimizer as SAMOptimizer

__all__ = ["SAM", "SAMOptimizer"]
