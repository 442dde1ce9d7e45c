"""Schedule scaling, under its established path."""

from composer.optim import scale_pytorch_scheduler as scale_pytorch_scheduler

__all__ = ["scale_pytorch_scheduler"]
