"""How the clocks of ranks compare."""

from __future__ import annotations

import time
from dataclasses import dataclass

from composer.utils import dist

__all__ = ["ClockSync"]


@dataclass(frozen=True)
class ClockSync:
    """What a rank's clock showed when all ranks left a barrier.

    Attributes:
        number: Of the barrier, the same on all ranks.
        timestamp_us: What the clock showed, in microseconds since 1970.
        error_bound_us: How much earlier the first rank may have left the barrier.
    """

    number: int
    timestamp_us: int
    error_bound_us: int

    @classmethod
    def measure(cls, number: int) -> ClockSync:
        """Let all ranks meet. To be called by all of them."""
        if dist.get_world_size() == 1:
            return cls(number, time.time_ns() // 1000, 0)
        dist.barrier()  # so that all wait for the second one at about the same time
        entered = time.time_ns() // 1000
        dist.barrier()
        left = time.time_ns() // 1000
        return cls(number, left, left - entered)
