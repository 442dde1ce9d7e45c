"""Training time as the schedules need it: numbers of one unit that the state can tell."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from composer.core import Time, TimeUnit, ensure_time
from composer.utils import check_finite
from composer.utils.interval_scheduler import check_has_tokens

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["_convert_time", "check_covers_run", "check_warmup", "elapsed", "factor", "fraction", "parse", "positive"]

log = logging.getLogger("composer.optim.scheduler")


def parse(time: str | Time[Any], name: str, zero: bool = False) -> Time[Any]:
    """`time` as a `Time`.

    Args:
        time: The time.
        name: The name of the argument.
        zero: Whether it may be zero.

    Raises:
        TypeError: `time` is neither a string nor a `Time`.
        ValueError: The string does not parse, or the time is negative or zero.
    """
    if not isinstance(time, (str, Time)):
        raise TypeError(f"`{name}` must be a `Time` or a time string, got {time!r}. Name the unit, for example '10ep'.")
    parsed = ensure_time(time, TimeUnit.EPOCH, argument=name)
    if parsed.value < 0 or (parsed.value == 0 and not zero):
        raise ValueError(
            f"`{name}` must {'not be negative' if zero else 'be positive'}, got {str(parsed)!r}. Use for example '1ep'."
        )
    return parsed


def factor(number: float, name: str) -> float:
    """Return the number, which multiplies a learning rate.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, NaN or infinite.
    """
    check_finite(**{name: number})
    if number < 0:
        raise ValueError(f"`{name}` must not be negative, got {number!r}: it multiplies a learning rate.")
    return number


def _convert_time(time: str | Time[Any], state: State, ssr: float = 1.0) -> Time[Any]:
    """`time` scaled by `ssr`, in a unit in which a schedule moves with every batch: never in epochs or seconds.

    A duration is a fraction of `state.max_duration`, which the Trainer has scaled already, so `ssr` is not applied to
    it. Epochs become batches, so that a schedule moves within an epoch. In a run of seconds, durations stay what they
    are and seconds become durations: a schedule moves within a second.

    Args:
        time: A `Time` or a time string.
        state: Read for `max_duration` and `dataloader_len`.
        ssr: Scale schedule ratio.

    Returns:
        A time in batches, samples, tokens or iterations, rounded down; or a duration, if `max_duration` is in seconds.

    Raises:
        ValueError: `time` is in seconds, but `max_duration` is not.
        RuntimeError: `time` is a duration and `max_duration` is not set, or the length of an epoch is needed and not
            known.
    """
    time = Time.from_input(time)
    end = state.max_duration
    if time.unit is TimeUnit.SECOND:
        if end is None or end.unit is not TimeUnit.SECOND:
            raise ValueError(
                f"The time of a schedule must not be in seconds unless `max_duration` is, got {time!r} in a run of "
                f"{None if end is None else str(end)!r}. Use 'ep', 'ba', 'sp' or 'tok'."
            )
        return Time(int(time.value * ssr) / (end.value or 1), TimeUnit.DURATION)
    if time.unit is TimeUnit.DURATION:
        if end is None:
            raise RuntimeError(f"`state.max_duration` must be set to use {time!r}, a fraction of the run.")
        if end.unit is TimeUnit.SECOND:
            return time
        if end.unit is TimeUnit.EPOCH:
            return Time(int(time.value * _batches_per_epoch(time, state) * end.value), TimeUnit.BATCH)
        return Time(int(time.value * end.value), end.unit)
    if time.unit is TimeUnit.ITERATION and state._iteration_length is None:
        raise ValueError(
            f"The time of a schedule must not be in iterations, got {str(time)!r}: the run has none. Use 'ep', "
            f"'ba', 'sp', 'tok' or 'dur'."
        )
    if time.unit is TimeUnit.EPOCH:
        time = Time(time.value * _batches_per_epoch(time, state), TimeUnit.BATCH)
    return Time(int(time.value * ssr), time.unit)


def _batches_per_epoch(time: Time[Any], state: State) -> int:
    length = state.dataloader_len
    if length is None:
        raise RuntimeError(
            f"The number of batches in an epoch must be known to convert {time!r} to batches. "
            f"Give the train dataloader a length or write the time in batches, samples or tokens."
        )
    return int(length)


def elapsed(state: State, unit: TimeUnit) -> float:
    """How much of `unit` has been trained; a whole number, but for durations.

    Raises:
        RuntimeError: The unit is tokens, and the batches have none.
    """
    if unit is TimeUnit.TOKEN:
        check_has_tokens(state, "the time of a schedule")
    if unit is TimeUnit.DURATION:
        done = state.get_elapsed_duration()
        assert done is not None, "times come to durations only in a run of seconds"
        return done.value
    return state.timestamp.get(unit).value


def fraction(part: float, whole: float) -> float:
    """`part / whole` within [0, 1]; 1 if there is no whole."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


def positive(time: Time[Any], name: str, given: Time[Any]) -> float:
    """The value of `time`, which was converted from the argument `name`.

    Raises:
        ValueError: It is zero or less.
    """
    if time.value <= 0:
        raise ValueError(
            f"`{name}` must come to at least one {time.unit.name.lower()}, got {given!r}, which comes to {time.value}."
        )
    value: float = time.value
    return value


def _end_of_run(state: State, unit: TimeUnit) -> Time[Any] | None:
    """The length of the run, in `unit` if it can be converted; None if it is not known."""
    end = state.max_duration
    if end is not None and end.unit is TimeUnit.EPOCH and unit is TimeUnit.BATCH and state.dataloader_len is not None:
        return Time(end.value * int(state.dataloader_len), TimeUnit.BATCH)
    if end is not None and end.unit is TimeUnit.SECOND and unit is TimeUnit.DURATION:
        return Time(1.0, TimeUnit.DURATION)
    return end


def check_warmup(t_warmup: Time[Any], end: Time[Any] | None, state: State) -> None:
    """Check that a warm-up ends before the schedule, or before the run if the schedule has no end of its own.

    Args:
        t_warmup: The warm-up, converted.
        end: The end of the schedule, converted; None: that of the run.
        state: The run.

    Raises:
        ValueError: It is longer.
    """
    what = "`t_max`" if end is not None else "the run"
    end = _end_of_run(state, t_warmup.unit) if end is None else end
    if end is not None and end.unit is t_warmup.unit and t_warmup.value > end.value:
        raise ValueError(
            f"`t_warmup` must not be longer than {what}, got a warm-up of {str(t_warmup)!r} and an end at "
            f"{str(end)!r}: the learning rate would never be reached. Use a shorter one, such as '0.1dur'."
        )


def check_covers_run(t_max: Time[Any], state: State) -> None:
    """Check that a schedule with warm-up ends no earlier than the run; only log if their units cannot be compared.

    Raises:
        ValueError: `t_max` is shorter than `state.max_duration`.
    """
    end = _end_of_run(state, t_max.unit)
    if end is None:
        return
    if end.unit is not t_max.unit:
        if elapsed(state, TimeUnit.BATCH) == 0:  # once per run, not once per batch
            log.warning(
                "Cannot compare `t_max` (%s) with the length of the run (%s): the schedule may end before the run.",
                t_max,
                end,
            )
    elif t_max.value < end.value:
        raise ValueError(
            f"`t_max` of a schedule with warm-up must be greater than or equal to max_duration, got {str(t_max)!r} in "
            f"a run of {str(end)!r}. Use `t_max='1dur'`. For a tail at a constant rate pass a function of your own as "
            f"the schedule, such as `lambda state, ssr=1.0: max(0.1, 1 - float(state.get_elapsed_duration()) / 0.8)`."
        )
