"""ZLoss: keep the logits of a softmax close to normalized."""

from composer.algorithms.z_loss.z_loss import ZLoss as ZLoss
from composer.algorithms.z_loss.z_loss import compute_z_loss as compute_z_loss

__all__ = ["ZLoss", "compute_z_loss"]
