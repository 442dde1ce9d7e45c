from __future__ import annotations

from composer.algorithms.utils.weight_swaps import SwapTimes
from composer.core import Event


def test_weights_leave_only_at_the_end_of_the_evaluation_for_which_they_entered() -> None:
    times = SwapTimes(predictions=False)
    assert times.is_due(Event.EVAL_START, swapped=False)
    assert times.is_due(Event.EVAL_END, swapped=True)
    # A checkpoint that is loaded now may hold the swapped weights. They stay until training continues.
    assert not times.is_due(Event.EVAL_END, swapped=True)
    assert times.is_due(Event.BATCH_START, swapped=True)
