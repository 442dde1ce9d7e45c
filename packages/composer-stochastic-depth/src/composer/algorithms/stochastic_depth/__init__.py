"""StochasticDepth: skip blocks of a residual network at random in training."""

from composer.algorithms.stochastic_depth.stochastic_depth import StochasticDepth as StochasticDepth
from composer.algorithms.stochastic_depth.stochastic_depth import apply_stochastic_depth as apply_stochastic_depth

__all__ = ["StochasticDepth", "apply_stochastic_depth"]
