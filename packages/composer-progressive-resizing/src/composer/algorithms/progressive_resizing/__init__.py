"""ProgressiveResizing: train on small images first, which grow to their full size."""

from composer.algorithms.progressive_resizing.progressive_resizing import ProgressiveResizing as ProgressiveResizing
from composer.algorithms.progressive_resizing.progressive_resizing import resize_batch as resize_batch
from composer.algorithms.progressive_resizing.progressive_resizing import resize_inputs as resize_inputs

__all__ = ["ProgressiveResizing", "resize_batch", "resize_inputs"]
