"""MixUp: train on convex combinations of pairs of examples."""

from composer.algorithms.mixup.mixup import MixUp as MixUp
from composer.algorithms.mixup.mixup import mixup_batch as mixup_batch

__all__ = ["MixUp", "mixup_batch"]
