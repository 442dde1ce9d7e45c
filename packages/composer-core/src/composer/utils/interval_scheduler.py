"""Make a function of an interval such as "2ep" that returns True each time the interval has passed."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, SupportsIndex

from composer.core.event import Event
from composer.core.time import Time, TimeUnit, ensure_time

if TYPE_CHECKING:
    from composer.core.state import State


def check_has_tokens(state: State, what: str) -> None:
    """Check that the trained batches had tokens.

    Args:
        state: The state of the run.
        what: The quantity that is measured in tokens, for the message.

    Raises:
        RuntimeError: Batches were trained, but no tokens.
    """
    if state.timestamp.tokens == 0 and state.timestamp.batches > 0:
        raise RuntimeError(
            f"The batches must have tokens for {what} in tokens ('tok'), which would never come: none of "
            f"the {state.timestamp.batches} batches so far had any. Tokens are those of `batch['input_ids']`, or "
            f"`max_seq_len` of the dataset per sample. Pass the training data as "
            f"`DataSpec(dataloader, get_num_tokens_in_batch=...)`, or use another unit, such as 'ba' or 'sp'."
        )


def create_interval_scheduler(
    interval: str | SupportsIndex | Time[Any],
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: set[Event] | None = None,
) -> Callable[[State, Event], bool]:
    """Return a function `(state, event) -> bool` that returns True each time an interval of training has passed.

    The function can return True at one event: after each batch for intervals in batches, samples, tokens, seconds and
    fractions of the run, after each epoch or iteration for these units. It does so if the count has passed a multiple
    of the interval since `state.previous_timestamp`.

    Args:
        interval: A time string, a `Time`, or a number of epochs. If it is not positive, no interval ever passes.
        include_end_of_training: Return True at the end of the run as well, unless the function did so at an
            earlier event of the same batch.
        checkpoint_events: Use BATCH_CHECKPOINT, EPOCH_CHECKPOINT and ITERATION_CHECKPOINT, which follow the
            evaluation, instead of BATCH_END, EPOCH_END and ITERATION_END.
        final_events: The events at which the end of the run is detected; None: BATCH_CHECKPOINT and EPOCH_CHECKPOINT.

    Returns:
        The function. It stores the last batch for which it returned True. It raises RuntimeError for a fraction
        ("0.1dur") of a run of unknown length, or, unless the length is in seconds, with a dataloader of unknown length,
        and for tokens after a batch without tokens. It raises ValueError for iterations in a run without iterations.

    Differs: fractions are exact, so "0.1dur" of 30 batches is every 3 batches, although the nearest float is slightly
        more than 0.1.
    """
    finals = frozenset((Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT) if final_events is None else final_events)
    last_batch, last_event = -1, None
    # Other libraries read `__closure__[-1]`: this name sorts last.
    time_interval = ensure_time(interval, TimeUnit.EPOCH, argument="interval")
    checkpoint, end = {
        TimeUnit.EPOCH: (Event.EPOCH_CHECKPOINT, Event.EPOCH_END),
        TimeUnit.ITERATION: (Event.ITERATION_CHECKPOINT, Event.ITERATION_END),
    }.get(time_interval.unit, (Event.BATCH_CHECKPOINT, Event.BATCH_END))
    regular = checkpoint if checkpoint_events else end

    def check_interval(state: State, event: Event) -> bool:
        nonlocal last_batch, last_event
        if time_interval.unit is TimeUnit.ITERATION and state._iteration_length is None:
            raise ValueError(
                f"An interval must not be in iterations, got '{time_interval}', which never passes: the run has no "
                f"iterations. Use for example '1ep' or '100ba'."
            )
        if event is not regular and event not in finals:
            return False
        if time_interval.value <= 0 or state.previous_timestamp is None:
            return False
        if time_interval.unit is TimeUnit.TOKEN:
            check_has_tokens(state, "an interval")
        batch = state.timestamp.batch.value
        # A second call at the same event, by another user of this function, returns the same.
        is_new = batch != last_batch or event is last_event
        is_due = include_end_of_training and event in finals and is_new and state.is_over()
        if not is_due:
            is_due = event is regular and _has_passed(state, time_interval)
        if is_due:
            last_batch, last_event = batch, event
        return is_due

    return check_interval


def _has_passed(state: State, interval: Time[Any]) -> bool:
    before, now = state.previous_timestamp, state.timestamp
    assert before is not None
    unit, step = interval.unit, interval.value
    if unit is TimeUnit.DURATION:
        if state.max_duration is not None and state.max_duration.unit is TimeUnit.SECOND:
            # Not rounded up to seconds, which would be too long for a fraction of a short run.
            step = max(1, state.max_duration.value) * interval.value
            return bool(before.total_wct.total_seconds() // step != now.total_wct.total_seconds() // step)
        if state.max_duration is None or state.dataloader_len is None:
            what = "run" if state.max_duration is None else "dataloader"
            raise RuntimeError(
                f"`interval` must not be a fraction of the run, got '{interval}', because the length of the {what} is "
                f"not known. Use an interval in batches ('ba') or samples ('sp')."
            )
        unit = state.max_duration.unit
        length = state.max_duration.value * Fraction(interval.value).limit_denominator(10**9)
        if unit is TimeUnit.EPOCH:
            length, unit = length * state.dataloader_len.value, TimeUnit.BATCH
        step = max(1, ceil(length))
    return bool(before.get(unit).value // step != now.get(unit).value // step)
