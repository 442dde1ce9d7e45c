"""A schedule that selects the batches to profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsIndex

from composer.core import State
from composer.profiler.profiler_action import ProfilerAction
from composer.utils import int_at_least


def cyclic_schedule(
    skip_first: SupportsIndex = 0,
    wait: SupportsIndex = 0,
    warmup: SupportsIndex = 1,
    active: SupportsIndex = 4,
    repeat: SupportsIndex = 1,
) -> Callable[[State], ProfilerAction]:
    """Create a schedule that repeats `wait`, `warmup` and `active` batches in every epoch.

    The last active batch of a cycle, or the last batch of the epoch if it is active, is ACTIVE_AND_SAVE.

    Args:
        skip_first: Batches to skip at the start of each epoch; in an epoch that is resumed, from the resumed batch on.
        wait: Batches to skip at the start of each cycle.
        warmup: Batches to warm up for.
        active: Batches to record, at least 1.
        repeat: The number of cycles in each epoch; 0: until its end.

    Returns:
        A function of the state that returns the action for the next batch.

    Raises:
        ValueError: A number is negative, or `active` is 0.

    Example:
        >>> import torch
        >>> from composer.core import Timestamp
        >>> state = State(model=torch.nn.Linear(1, 1))
        >>> schedule, actions = cyclic_schedule(wait=1, warmup=1, active=2), []
        >>> for batch in range(5):
        ...     state.timestamp = Timestamp(batch_in_epoch=batch)
        ...     actions.append(schedule(state).value)
        >>> actions
        ['skip', 'warmup', 'active', 'active_and_save', 'skip']
    """
    skip_first, wait = int_at_least("skip_first", skip_first, 0), int_at_least("wait", wait, 0)
    warmup, active = int_at_least("warmup", warmup, 0), int_at_least("active", active, 1)
    repeat = int_at_least("repeat", repeat, 0)
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        batch = state.timestamp.batches_in_epoch
        position = batch - skip_first - getattr(state.profiler, "resumption_batch_idx", 0)
        if position < 0 or (repeat and position >= cycle * repeat):
            return ProfilerAction.SKIP
        position %= cycle
        if position < wait:
            return ProfilerAction.SKIP
        if position < wait + warmup:
            return ProfilerAction.WARMUP
        length = state.dataloader_len
        is_last = length is not None and batch + 1 >= length.value
        return ProfilerAction.ACTIVE_AND_SAVE if is_last or position == cycle - 1 else ProfilerAction.ACTIVE

    return schedule
