"""ScaleSchedule: shorten or stretch a run and its schedules together."""

from composer.algorithms.scale_schedule.scale_schedule import ScaleSchedule as ScaleSchedule
from composer.algorithms.scale_schedule.scale_schedule import scale_scheduler as scale_scheduler

__all__ = ["ScaleSchedule", "scale_scheduler"]
