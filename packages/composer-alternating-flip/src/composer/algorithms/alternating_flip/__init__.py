"""AlternatingFlip: mirror each training image in every other epoch."""

from composer.algorithms.alternating_flip.alternating_flip import AlternatingFlip as AlternatingFlip
from composer.algorithms.alternating_flip.alternating_flip import FlippedDataset as FlippedDataset
from composer.algorithms.alternating_flip.alternating_flip import compute_flip_parities as compute_flip_parities
from composer.algorithms.alternating_flip.alternating_flip import flip_batch as flip_batch

__all__ = ["AlternatingFlip", "FlippedDataset", "compute_flip_parities", "flip_batch"]
