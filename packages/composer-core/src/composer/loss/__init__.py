"""Loss functions for class targets, given as indices or as probabilities."""

from composer.loss.loss import DiceLoss as DiceLoss
from composer.loss.loss import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
from composer.loss.loss import loss_registry as loss_registry
from composer.loss.loss import soft_cross_entropy as soft_cross_entropy

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "loss_registry", "soft_cross_entropy"]
