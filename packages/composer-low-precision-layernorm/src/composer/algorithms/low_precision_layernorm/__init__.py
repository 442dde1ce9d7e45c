"""LowPrecisionLayerNorm: run layer normalization in the low precision of the rest of the model."""

from composer.algorithms.low_precision_layernorm.low_precision_layernorm import (
    LowPrecisionLayerNorm as LowPrecisionLayerNorm,
)
from composer.algorithms.low_precision_layernorm.low_precision_layernorm import LPLayerNorm as LPLayerNorm
from composer.algorithms.low_precision_layernorm.low_precision_layernorm import (
    apply_low_precision_layernorm as apply_low_precision_layernorm,
)

__all__ = ["LPLayerNorm", "LowPrecisionLayerNorm", "apply_low_precision_layernorm"]
