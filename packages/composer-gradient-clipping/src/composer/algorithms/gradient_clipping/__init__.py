"""GradientClipping: limit gradients before the optimizer uses them."""

from composer.algorithms.gradient_clipping.gradient_clipping import GradientClipping as GradientClipping
from composer.algorithms.gradient_clipping.gradient_clipping import apply_agc as apply_agc
from composer.algorithms.gradient_clipping.gradient_clipping import apply_gradient_clipping as apply_gradient_clipping

__all__ = ["GradientClipping", "apply_agc", "apply_gradient_clipping"]
