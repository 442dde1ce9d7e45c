"""CutMix: train on images with a box of another image pasted in."""

from composer.algorithms.cutmix.cutmix import CutMix as CutMix
from composer.algorithms.cutmix.cutmix import cutmix_batch as cutmix_batch

__all__ = ["CutMix", "cutmix_batch"]
