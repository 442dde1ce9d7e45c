"""The training loop."""

from composer.trainer.trainer import Trainer as Trainer

__all__ = ["Trainer"]
