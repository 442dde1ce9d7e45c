"""The order of a training step, for loops that are written by hand and for the trainers of other libraries."""

from composer.loop.driver import Driver as Driver
from composer.loop.hosted_run import HostedRun as HostedRun

__all__ = ["Driver", "HostedRun"]
