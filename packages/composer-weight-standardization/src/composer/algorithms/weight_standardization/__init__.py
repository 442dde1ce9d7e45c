"""WeightStandardization: convolutions whose filters have mean 0 and variance 1."""

from composer.algorithms.weight_standardization.weight_standardization import (
    WeightStandardization as WeightStandardization,
)
from composer.algorithms.weight_standardization.weight_standardization import WeightStandardizer as WeightStandardizer
from composer.algorithms.weight_standardization.weight_standardization import (
    apply_weight_standardization as apply_weight_standardization,
)

__all__ = ["WeightStandardization", "WeightStandardizer", "apply_weight_standardization"]
