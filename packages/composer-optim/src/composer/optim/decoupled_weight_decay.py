"""SGD and AdamW whose weight decay follows the shape of the schedule, not the size of the learning rate."""

from composer.optim._adamw import DecoupledAdamW as DecoupledAdamW
from composer.optim._sgdw import DecoupledSGDW as DecoupledSGDW

__all__ = ["DecoupledAdamW", "DecoupledSGDW"]
