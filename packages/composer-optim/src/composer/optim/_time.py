"""Training time as the schedules need it: numbers of one unit that the state can tell."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from composer.core import Time, TimeUnit, ensure_time
from composer.utils import check_finite

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["_convert_time", "check_covers_run", "elapsed", "finite", "fraction", "parse", "positive"]

log = logging.getLogger("composer.optim.scheduler")


def parse(time: str | Time[Any], name: str) -> Time[Any]:
    """`time` as a `Time`.

    Raises:
        TypeError: `time` is neither a string nor a `Time`.
        ValueError: The string does not parse.
    """
    if not isinstance(time, (str, Time)):
        raise TypeError(f"`{name}` must be a `Time` or a time string, got {time!r}. Name the unit, for example '10ep'.")
    return ensure_time(time, TimeUnit.EPOCH, argument=name)


def finite(number: float, name: str) -> float:
    """Return the number.

    Raises:
        ValueError: It is NaN or infinite.
    """
    check_finite(**{name: number})
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
    """How much of `unit` has been trained; a whole number, but for durations."""
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


def check_covers_run(t_max: Time[Any], state: State) -> None:
    """Check that a schedule with warm-up ends no earlier than the run; only log if their units cannot be compared.

    Raises:
        ValueError: `t_max` is shorter than `state.max_duration`.
    """
    end = state.max_duration
    if end is None:
        return
    if end.unit is TimeUnit.EPOCH and t_max.unit is TimeUnit.BATCH and state.dataloader_len is not None:
        end = Time(end.value * int(state.dataloader_len), TimeUnit.BATCH)
    elif end.unit is TimeUnit.SECOND and t_max.unit is TimeUnit.DURATION:
        end = Time(1.0, TimeUnit.DURATION)
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
