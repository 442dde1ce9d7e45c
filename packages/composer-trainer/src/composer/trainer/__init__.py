"""The training loop, and what runs its steps on many ranks."""

from composer.trainer.data_parallel import DataParallel as DataParallel
from composer.trainer.strategy import RankStrategy as RankStrategy
from composer.trainer.strategy import Strategy as Strategy
from composer.trainer.trainer import Trainer as Trainer

__all__ = ["DataParallel", "RankStrategy", "Strategy", "Trainer"]
