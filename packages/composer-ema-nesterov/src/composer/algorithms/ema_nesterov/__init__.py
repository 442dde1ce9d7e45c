"""EMANesterov: take each step from a point ahead, in the average direction of the steps so far."""

from composer.algorithms.ema_nesterov.ema_nesterov import EMANesterov as EMANesterov
from composer.algorithms.ema_nesterov.ema_nesterov import displace_weights as displace_weights

__all__ = ["EMANesterov", "displace_weights"]
