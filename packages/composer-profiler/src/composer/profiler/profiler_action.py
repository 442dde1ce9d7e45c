"""The action of a profiler during a batch."""

from __future__ import annotations

from composer.utils import StringEnum


class ProfilerAction(StringEnum):
    """Action of a profiler during a batch, returned by a schedule.

    Attributes:
        SKIP: Record nothing.
        WARMUP: Record markers; torch's profiler runs, but its events are dropped, because its start is slow.
        ACTIVE: Record.
        ACTIVE_AND_SAVE: Record, and write the trace at the end of the batch.
    """

    SKIP = "skip"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_AND_SAVE = "active_and_save"
