"""EMA: evaluate and save an exponential moving average of the weights."""

from composer.algorithms.ema.ema import EMA as EMA
from composer.algorithms.ema.ema import EMAParameters as EMAParameters
from composer.algorithms.ema.ema import compute_ema as compute_ema

__all__ = ["EMA", "EMAParameters", "compute_ema"]
