"""Training time: lengths (`Time`) and the progress of a run (`Timestamp`)."""

from __future__ import annotations

from composer.core._time import Time as Time
from composer.core._time import TimeUnit as TimeUnit
from composer.core._time import ensure_time as ensure_time
from composer.core._timestamp import Timestamp as Timestamp

__all__ = ["Time", "TimeUnit", "Timestamp", "ensure_time"]
