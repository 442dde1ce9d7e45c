"""Distillation: learn from the predictions of a teacher as well as from labels."""

from composer.algorithms.distillation.distillation import Distillation as Distillation
from composer.algorithms.distillation.distillation import compute_distillation_loss as compute_distillation_loss

__all__ = ["Distillation", "compute_distillation_loss"]
