"""How the clocks of ranks compare."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from composer.utils import dist

__all__ = ["ClockSync"]

_ROUNDS = 10  # of which one in which no rank was kept off its core is likely


@dataclass(frozen=True)
class ClockSync:
    """What a rank's clock showed when all ranks left a barrier.

    Attributes:
        number: Of the barrier, the same on all ranks.
        timestamp_us: What the clock showed, in microseconds since 1970.
        error_bound_us: How much earlier the first rank may have left the barrier. What two clocks showed differs from
            what they showed at the same moment by at most the larger bound of the two.
    """

    number: int
    timestamp_us: int
    error_bound_us: int

    @classmethod
    def measure(cls, number: int) -> ClockSync:
        """Let all ranks meet a few times, and take the time at which they did so most promptly.

        To be called by all ranks.
        """
        if dist.get_world_size() == 1:
            return cls(number, time.time_ns() // 1000, 0)
        dist.barrier()  # so that all wait for the next one at about the same time
        times = [time.time_ns() // 1000]
        for _ in range(_ROUNDS):
            dist.barrier()
            times.append(time.time_ns() // 1000)
        waits = [left - entered for entered, left in pairwise(times)]
        longest = [max(of_ranks) for of_ranks in zip(*dist.all_gather_object(waits), strict=True)]
        best = longest.index(min(longest))  # the same on all ranks
        return cls(number, times[best + 1], waits[best])
