"""Which batches of an epoch are profiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.core import State
from composer.profiler.profiler_action import ProfilerAction

__all__ = ["cyclic_schedule"]


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """A schedule that repeats `wait`, `warmup` and `active` batches in every epoch.

    The last active batch of a cycle, or the epoch's last batch if that is active, is ACTIVE_AND_SAVE.

    Args:
        skip_first: Batches to skip at the beginning of each epoch; when a run is resumed in the middle of one, from
            there on.
        wait: Batches to skip at the beginning of each cycle.
        warmup: Batches to warm up for.
        active: Batches to record, at least 1.
        repeat: Cycles in each epoch; 0: until its end.

    Returns:
        A function of the state that says what to do in the batch that is trained next.

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
    numbers: dict[str, Any] = {
        "skip_first": skip_first,
        "wait": wait,
        "warmup": warmup,
        "active": active,
        "repeat": repeat,
    }
    for name, number in numbers.items():
        least = 1 if name == "active" else 0
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"`{name}` must be a number of at least {least}, got {number!r}.")
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        batch = state.timestamp._batch_in_epoch
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
