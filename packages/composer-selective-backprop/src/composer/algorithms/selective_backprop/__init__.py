"""SelectiveBackprop: skip examples with a low loss."""

from composer.algorithms.selective_backprop.selective_backprop import SelectiveBackprop as SelectiveBackprop
from composer.algorithms.selective_backprop.selective_backprop import do_selective_backprop as do_selective_backprop
from composer.algorithms.selective_backprop.selective_backprop import select_using_loss as select_using_loss
from composer.algorithms.selective_backprop.selective_backprop import (
    should_selective_backprop as should_selective_backprop,
)

__all__ = [
    "SelectiveBackprop",
    "do_selective_backprop",
    "select_using_loss",
    "should_selective_backprop",
]
