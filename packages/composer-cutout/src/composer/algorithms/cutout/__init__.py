"""CutOut: train on images with square holes."""

from composer.algorithms.cutout.cutout import CutOut as CutOut
from composer.algorithms.cutout.cutout import cutout_batch as cutout_batch

__all__ = ["CutOut", "cutout_batch"]
