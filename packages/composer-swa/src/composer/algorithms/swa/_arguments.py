"""Whether the arguments of SWA fit together, and the run fits them."""

from __future__ import annotations

import warnings
from typing import Any

from composer.core import State, Time, TimeUnit
from composer.utils import check_finite, check_integers

__all__ = ["check_run", "check_steps", "has_passed", "parse", "parse_strategy", "warn_of_late_start"]

_STRATEGIES = {"linear": "linear", "lin": "linear", "cos": "cos", "cosine": "cos"}


def parse(swa_start: Any, swa_end: Any, update_interval: Any) -> tuple[Time[Any], Time[Any], Time[Any]]:
    """The times as `Time` objects.

    Raises:
        ValueError: Units or values do not fit.
    """
    start, end = _time("swa_start", swa_start), _time("swa_end", swa_end)
    interval = _time("update_interval", update_interval)
    if start.unit is not end.unit:
        raise ValueError(f"`swa_start` and `swa_end` must have the same unit, got '{start}' and '{end}'.")
    if start.unit not in (TimeUnit.DURATION, TimeUnit.EPOCH):
        raise ValueError(f"`swa_start` and `swa_end` must be in 'dur' or 'ep', got '{start}'. Use '0.7dur'.")
    if interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        raise ValueError(f"`update_interval` must be in 'ba' or 'ep', got '{interval}'. Use '1ep'.")
    if interval.value < 1:
        raise ValueError(f"`update_interval` must be at least 1, got '{interval}'.")
    if start >= end:
        raise ValueError(f"`swa_start` must be before `swa_end`, got '{start}' and '{end}'.")
    if start.value < 0 or (end.unit is TimeUnit.DURATION and end.value > 1):
        raise ValueError(f"`swa_start` and `swa_end` must be within the run, got '{start}' and '{end}'.")
    return start, end, interval


def parse_strategy(strategy: str) -> str:
    """The strategy under its own name, "linear" or "cos".

    Raises:
        ValueError: It is unknown.
    """
    found = _STRATEGIES.get(str(strategy).lower())
    if found is None:
        raise ValueError(f"`anneal_strategy` must be 'linear' or 'cos', got {strategy!r}.")
    return found


def check_steps(anneal_steps: int, swa_lr: float | None) -> None:
    """Raise ValueError unless both are in range."""
    check_integers(anneal_steps=anneal_steps)
    if swa_lr is not None:
        check_finite(swa_lr=swa_lr)
    if anneal_steps <= 0:
        raise ValueError(f"`anneal_steps` must be positive, got {anneal_steps!r}. Use 1 to jump to `swa_lr`.")
    if swa_lr is not None and swa_lr < 0:
        raise ValueError(f"`swa_lr` must not be negative, got {swa_lr!r}. None keeps the learning rate.")


def check_run(state: State) -> None:
    """Raise RuntimeError unless there is one learning rate to schedule."""
    way_out = "Use `schedule_swa_lr=False`."
    if len(state.optimizers) != 1:
        raise RuntimeError(
            f"`SWA` can schedule the learning rate of one optimizer, got {len(state.optimizers)}. {way_out}"
        )
    if len(state.schedulers) > 1:
        raise RuntimeError(
            f"`SWA` can schedule the learning rate next to one scheduler, got {len(state.schedulers)}. {way_out}"
        )
    rates = {float(group["lr"]) for group in state.optimizers[0].param_groups}
    if len(rates) != 1:
        raise RuntimeError(f"`SWA` can schedule one learning rate for all groups, got {sorted(rates)}. {way_out}")


def warn_of_late_start(start: Time[Any], state: State) -> None:
    """Warn if this call of `fit` ends before there is anything to average; a later one may go on."""
    end, length = state.max_duration, state.dataloader_len
    if end is None or start.unit is not TimeUnit.EPOCH:
        return
    if end.unit is TimeUnit.BATCH and length is not None:
        end = Time(end.value // length.value, TimeUnit.EPOCH)
    if end.unit is TimeUnit.EPOCH and start.value > end.value:
        warnings.warn(
            f"`SWA` averages nothing in this `fit`: `swa_start` is '{start}', and the run ends at '{end}'. Make it "
            f"earlier, or use a fraction of the run such as '0.7dur'.",
            stacklevel=2,
        )


def has_passed(time: Time[Any], state: State) -> bool:
    """Whether the run has come so far."""
    if time.unit is TimeUnit.DURATION:
        elapsed = state.get_elapsed_duration()
        return elapsed is not None and elapsed >= time
    return state.timestamp >= time


def _time(argument: str, value: Any) -> Time[Any]:
    if not isinstance(value, (str, Time)):
        raise TypeError(f"`{argument}` must be a time string or a `Time`, got {value!r}. Use for example '1ep'.")
    return value if isinstance(value, Time) else Time.from_timestring(value)
