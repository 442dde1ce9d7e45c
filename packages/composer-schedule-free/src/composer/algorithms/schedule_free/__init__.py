"""Schedule-Free: train without a decaying learning rate, and evaluate and save the average of the weights."""

from composer.algorithms.schedule_free.optimizers import ScheduleFreeAdamW as ScheduleFreeAdamW
from composer.algorithms.schedule_free.optimizers import ScheduleFreeSGD as ScheduleFreeSGD
from composer.algorithms.schedule_free.optimizers import build_schedule_free as build_schedule_free
from composer.algorithms.schedule_free.schedule_free import ScheduleFree as ScheduleFree

__all__ = ["ScheduleFree", "ScheduleFreeAdamW", "ScheduleFreeSGD", "build_schedule_free"]
