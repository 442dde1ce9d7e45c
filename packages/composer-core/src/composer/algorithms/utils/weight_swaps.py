"""Decide when weights are swapped into the model, and parse the settings of algorithms that average weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.core.event import Event
from composer.core.time import Time, TimeUnit

if TYPE_CHECKING:
    from composer.core.state import State

_log = logging.getLogger(__name__)

CHECKPOINT_EVENTS = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)
# Training continues at these events, so the model must hold the training weights afterwards.
RESTORE_EVENTS = frozenset(
    {
        *(Event.FIT_START, Event.ITERATION_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.BATCH_START),
        *(Event.EPOCH_END, Event.ITERATION_END),
    }
)
_LEAVE_WITH = {Event.EVAL_START: Event.EVAL_END, Event.PREDICT_START: Event.PREDICT_END}


class SwapTimes:
    """The rule that decides at each event whether the weights to evaluate and save enter the model, or leave it.

    They enter at EVAL_START, at checkpoint events at which a callback saves, at FIT_END and, with `predictions`, at
    PREDICT_START. They leave at the end of the evaluation or prediction for which they entered, and otherwise at the
    first event of training that follows. So after `fit` they stay in the model.

    Args:
        predictions: Also swap for predictions in the middle of training.

    Attributes:
        events: The events at which a swap may be due.
    """

    def __init__(self, predictions: bool) -> None:
        entries = {Event.EVAL_START, Event.FIT_END, *([Event.PREDICT_START] if predictions else [])}
        self._entries = frozenset(entries)
        exits = {_LEAVE_WITH[event] for event in entries & _LEAVE_WITH.keys()}
        self.events = frozenset({Event.AFTER_LOAD, *entries, *exits, *CHECKPOINT_EVENTS, *RESTORE_EVENTS})
        self._until: Event | None = None  # the end of the evaluation or prediction for which they entered

    def match(self, event: Event, state: State, *, ready: bool, swapped: bool) -> bool:
        """Return True if a swap may be due.

        Args:
            event: The current event.
            state: The state of the run.
            ready: True if there are weights to swap in.
            swapped: True if they are in the model.
        """
        if event in self._entries:
            return ready
        if event in CHECKPOINT_EVENTS:
            return ready and is_saving(event, state)
        if event is self._until:
            return True
        return swapped and (event is Event.AFTER_LOAD or event in RESTORE_EVENTS)

    def is_due(self, event: Event, *, swapped: bool) -> bool:
        """Return True if the weights must be swapped now, in or out; call it once per event.

        Args:
            event: The current event.
            swapped: True if the weights to evaluate are in the model.
        """
        if swapped:
            leaves = event is self._until or event in RESTORE_EVENTS
            if leaves:
                self._until = None
            return leaves
        if event in self._entries or event in CHECKPOINT_EVENTS:
            self._until = _LEAVE_WITH.get(event)
            return True
        return False


def is_saving(event: Event, state: State) -> bool:
    """Return True if a callback saves a checkpoint at this event, according to its `save_interval(state, event)`."""
    intervals = (getattr(callback, "save_interval", None) for callback in state.callbacks)
    return any(interval(state, event) for interval in intervals if callable(interval))


def warn_of_changes(changed: Sequence[str]) -> None:
    """Log a warning that parameters were changed between two calls of `fit`, while averages were in the model.

    Args:
        changed: The names of the parameters.
    """
    if changed:
        names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        _log.warning(
            "%d parameters (%s) were changed while the averages were in the model: training and averages continue from "
            "their present values.",
            len(changed),
            names,
        )


def has_passed(time: Time[Any], state: State) -> bool:
    """Return True if the run has reached a time, which may be a fraction of the run."""
    if time.unit is TimeUnit.DURATION:
        elapsed = state.get_elapsed_duration()
        return elapsed is not None and elapsed >= time
    return state.timestamp >= time


def run_length(state: State, unit: TimeUnit) -> float | None:
    """Return the length of the run in batches or epochs, or None if it is unknown.

    Args:
        state: The state of the run.
        unit: The unit of the result.
    """
    end, per_epoch = state.max_duration, state.dataloader_len
    if end is None or end.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        return None
    if end.unit is unit:
        return float(end.value)
    if per_epoch is None:
        return None
    return float(end.value * per_epoch.value if unit is TimeUnit.BATCH else end.value / per_epoch.value)


def warn_of_late_start(owner: str, argument: str, start: Time[Any], state: State) -> None:
    """Warn, at FIT_START, if this call of `fit` ends before something begins; a later call may reach it.

    Args:
        owner: The name of the algorithm.
        argument: The name of the argument that says when it begins.
        start: Its value.
        state: The state of the run.
    """
    length = run_length(state, start.unit) if start.unit in (TimeUnit.BATCH, TimeUnit.EPOCH) else None
    if length is not None and start.value > length:
        warnings.warn(
            f"`{owner}` does nothing in this `fit`: `{argument}` is '{start}', and the run ends at "
            f"'{state.max_duration}'. Set an earlier start, or use a fraction of the run such as '0.7dur'.",
            stacklevel=3,
        )


def parse_time(argument: str, given: Any, least: float, example: str = "100ba") -> Time[Any]:
    """Return an argument as a `Time`.

    Args:
        argument: The name of the argument.
        given: A time string or a `Time`.
        least: The smallest allowed value, in any unit but fractions of the run, which are from 0 to 1.
        example: A good value, for the message.

    Raises:
        TypeError: It is neither.
        ValueError: It cannot be parsed, is too small, or a fraction beyond the run.
    """
    if not isinstance(given, (str, Time)):
        raise TypeError(
            f"`{argument}` must be a time string or a `Time`, got {given!r}. Write for example {example!r}."
        )
    time = Time.from_input(given)
    if time.unit is TimeUnit.DURATION and not 0 <= time.value <= 1:
        raise ValueError(f"`{argument}` must be from '0dur' to '1dur', the end of the run, got {str(given)!r}.")
    if time.value < least and time.unit is not TimeUnit.DURATION:
        raise ValueError(f"`{argument}` must be at least {least}, got {str(given)!r}.")
    return time
