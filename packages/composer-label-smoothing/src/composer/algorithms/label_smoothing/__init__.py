"""LabelSmoothing: move targets towards the uniform distribution."""

from composer.algorithms.label_smoothing.label_smoothing import LabelSmoothing as LabelSmoothing
from composer.algorithms.label_smoothing.label_smoothing import smooth_labels as smooth_labels

__all__ = ["LabelSmoothing", "smooth_labels"]
