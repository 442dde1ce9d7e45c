"""LAWA: evaluate and save the mean of the latest weights; averages of any length, also after training."""

from composer.algorithms.lawa.averaging import average_checkpoints as average_checkpoints
from composer.algorithms.lawa.averaging import average_weights as average_weights
from composer.algorithms.lawa.lawa import LAWA as LAWA
from composer.algorithms.lawa.post_hoc_ema import PostHocEMA as PostHocEMA
from composer.algorithms.lawa.post_hoc_ema import reconstruct_ema as reconstruct_ema
from composer.algorithms.lawa.post_hoc_ema import solve_ema_weights as solve_ema_weights

__all__ = ["LAWA", "PostHocEMA", "average_checkpoints", "average_weights", "reconstruct_ema", "solve_ema_weights"]
