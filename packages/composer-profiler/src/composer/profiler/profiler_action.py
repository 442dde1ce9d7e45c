"""What a profiler does during a batch."""

from __future__ import annotations

from composer.utils import StringEnum

__all__ = ["ProfilerAction"]


class ProfilerAction(StringEnum):
    """What a profiler does during a batch. A schedule chooses it.

    Attributes:
        SKIP: Nothing.
        WARMUP: Record, but do not keep what torch's profiler records: its start is slow.
        ACTIVE: Record.
        ACTIVE_AND_SAVE: Record, and write what was recorded at the end of the batch.
    """

    SKIP = "skip"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_AND_SAVE = "active_and_save"
