"""The base class of callbacks."""

from __future__ import annotations

import difflib
import inspect
import warnings
from abc import ABC
from typing import TYPE_CHECKING, Any

from composer.core.event import Event
from composer.core.serializable import Serializable

if TYPE_CHECKING:
    from composer.core.logging import Logger
    from composer.core.state import State

_HOOKS = frozenset(event.value for event in Event)


class Callback(Serializable, ABC):
    """An observer of a run, with one method per event that takes the state and the logger. Override those you need.

    The engine calls only overridden methods. A subclass that overrides `run_event` instead is called at every event.
    A callback must work across several `fit` calls and, after `close`, in a new run.

    The engine looks up which methods are overridden when it compiles its dispatch table. A method
    `(self, state, logger)` whose name is almost that of an event causes a warning when the class is created.

    Example:
        >>> class Counter(Callback):
        ...     steps = 0
        ...
        ...     def batch_end(self, state, logger):
        ...         self.steps += 1
    """

    _opened_as: int | None = None  # the id of this object while an engine uses it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if name.startswith("_") or name in _OWN or name in _HOOKS or not inspect.isfunction(value):
                continue
            if list(inspect.signature(value).parameters) != ["self", "state", "logger"]:
                continue
            near = difflib.get_close_matches(name.removeprefix("on_"), _HOOKS, n=1, cutoff=0.9)
            # A class that also defines the method of that event has a helper for it.
            if near and getattr(cls, near[0]) is getattr(Callback, near[0]):
                warnings.warn(
                    f"`{cls.__name__}.{name}` is not the name of an event and is never called by the engine. Did you "
                    f"mean `{near[0]}`? If it is a helper, start its name with an underscore.",
                    stacklevel=2,
                )

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method named after the event.

        Args:
            event: The current event.
            state: The state of the run.
            logger: The run's logger.
        """
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """Called at `Event.INIT`."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_LOAD`."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_LOAD`."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.FIT_START`."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_START`."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_START`."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_DATALOADER`."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_DATALOADER`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_START`."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_TRAIN_BATCH`."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_FORWARD`."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_FORWARD`."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_LOSS`."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_LOSS`."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_BACKWARD`."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_BACKWARD`."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_TRAIN_BATCH`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_END`."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_CHECKPOINT`."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_END`."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_CHECKPOINT`."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_END`."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_CHECKPOINT`."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.FIT_END`."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BEFORE_ALL`."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_START`."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BATCH_START`."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BEFORE_FORWARD`."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_AFTER_FORWARD`."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BATCH_END`."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_END`."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_AFTER_ALL`."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_STANDALONE_START`."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_STANDALONE_END`."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_START`."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BATCH_START`."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BEFORE_FORWARD`."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_AFTER_FORWARD`."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BATCH_END`."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_END`."""

    def close(self, state: State, logger: Logger) -> None:
        """Release resources. Called when the engine closes, also after an error; must be safe to call twice.

        Args:
            state: The state of the run.
            logger: The run's logger.
        """

    def post_close(self) -> None:
        """Release what the `close` of other callbacks may need. Called after all `close` methods; logging is over."""


_OWN = frozenset({"state_dict", "load_state_dict", "run_event", "close", "post_close"})


def dispatches_by_name(callback: Callback) -> bool:
    """Return True if `run_event` is not overridden, so that the engine may call the methods directly."""
    return getattr(type(callback), "run_event", None) is Callback.run_event and "run_event" not in vars(callback)


def overridden_hooks(callback: Callback) -> frozenset[str]:
    """Return the values of the events whose methods a callback overrides; all if it overrides `run_event`."""
    if not dispatches_by_name(callback):
        return _HOOKS
    return frozenset(
        hook
        for hook in _HOOKS
        if getattr(type(callback), hook, None) is not getattr(Callback, hook) or hook in vars(callback)
    )
