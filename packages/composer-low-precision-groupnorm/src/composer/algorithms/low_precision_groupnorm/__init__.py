"""LowPrecisionGroupNorm: run group normalization in the low precision of the rest of the model."""

from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import (
    LowPrecisionGroupNorm as LowPrecisionGroupNorm,
)
from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import LPGroupNorm as LPGroupNorm
from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import (
    apply_low_precision_groupnorm as apply_low_precision_groupnorm,
)

__all__ = ["LPGroupNorm", "LowPrecisionGroupNorm", "apply_low_precision_groupnorm"]
