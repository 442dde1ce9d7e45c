"""The comparison of the clocks of ranks."""

from __future__ import annotations

import time

import pytest

from composer.profiler.profiler import ClockSync
from composer.testing import run_on_ranks
from composer.utils import dist

HELD_UP_SECONDS = 0.4


def test_a_single_process_has_no_error_bound() -> None:
    before = time.time_ns() // 1000
    sync = ClockSync.measure(3)
    assert (sync.number, sync.error_bound_us) == (3, 0)
    assert before <= sync.timestamp_us <= time.time_ns() // 1000


def _measure_held_up() -> list[ClockSync]:
    barrier, left = dist.barrier, 0

    def held_up() -> None:
        nonlocal left
        barrier()
        left += 1
        if dist.get_global_rank() == 1 and left <= 4:
            time.sleep(HELD_UP_SECONDS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", held_up)
        return dist.all_gather_object(ClockSync.measure(7))


def test_a_rank_that_reads_its_clock_late_does_not_count() -> None:
    (syncs, same) = run_on_ranks(_measure_held_up, 2)

    assert syncs == same
    assert [sync.number for sync in syncs] == [7, 7]
    bounds = [sync.error_bound_us for sync in syncs]
    assert all(0 < bound < HELD_UP_SECONDS * 1e6 for bound in bounds)
    assert abs(syncs[0].timestamp_us - syncs[1].timestamp_us) <= max(bounds)  # the ranks have one clock
