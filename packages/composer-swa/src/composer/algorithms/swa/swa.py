"""The algorithm, the average of the weights, and the learning rate while they are averaged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.stored_weights import StoredWeights
from composer.algorithms.utils.weight_swaps import has_passed, parse_time, warn_of_late_start
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CHANGES_MEMORY_FORMAT,
    REPLACES_MODEL,
    SWAPS_WEIGHTS,
    Algorithm,
    Event,
    Placement,
    Time,
    TimeUnit,
)
from composer.utils import check_finite, check_flags, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_log = logging.getLogger(__name__)

_WHOLE_RUN = Time(1.0, TimeUnit.DURATION)
_STRATEGIES = {"linear": "linear", "lin": "linear", "cos": "cos", "cosine": "cos"}
_PREFIX = "module."


class SWA(Algorithm):
    """Stochastic weight averaging: use the average of the weights of late epochs as the weights of the model.

    From `swa_start` on, after every `update_interval`, the trainable weights enter an equal average:
    `average <- average + (weights - average) / (n + 1)`. At the first batch or epoch end from `swa_end` on, the average
    becomes the weights of the model, and training continues from there, so that batch norm statistics are updated. If
    the run ends before that, the average becomes the weights at FIT_END. All of this happens between batches, so
    microbatches equal one batch.

    With `schedule_swa_lr` the learning rate changes to `swa_lr` within `anneal_steps` updates and stays there until
    `swa_end`, overriding the scheduler of the run.

    **Events** INIT, FIT_START (checks), BATCH_END or EPOCH_END (both with `schedule_swa_lr`), FIT_END. **Reads** the
    weights, the timestamp. **Writes** the weights, once; learning rates with `schedule_swa_lr`. **Cost** memory for a
    copy of the weights; one fused pass over it per update. **Compilation** static; nothing synchronizes with the
    device. **When not to use it** together with another method that averages weights.

    Args:
        swa_start: When averaging starts, in "dur" or "ep".
        swa_end: When the average becomes the weights of the model, in the same unit. The rest of the run should be at
            least one `update_interval` long, otherwise batch norm statistics do not match the average.
        update_interval: The time between updates, in "ba" or "ep".
        schedule_swa_lr: Schedule the learning rate.
        anneal_strategy: "linear" or "cos".
        anneal_steps: The number of updates until `swa_lr` is reached.
        swa_lr: The final learning rate. None: the learning rate at the start of averaging.

    Attributes:
        swa_model: The averages, as `StoredWeights` without buffers; None before `swa_start`.
        num_averaged: The number of weights in the average.
        swa_scheduler: The schedule of the learning rate; None unless it is scheduled.
        swa_started: True once averaging has started.
        swa_completed: True once the average is in the model.
        step_counter: The number of batches or epochs since the start.
        match_event: BATCH_END or EPOCH_END.

    Raises:
        ValueError: Times have different or unsupported units, are not in order or not within the run, or another
            argument is out of range.
        RuntimeError: At FIT_START, with `schedule_swa_lr`, if there are several learning rates, or several schedulers
            of an optimizer.

    Warns:
        NoEffectWarning: Fewer than two sets of weights were averaged.

    Example:
        >>> SWA(update_interval="100ba").match_event
        <Event.BATCH_END: 'batch_end'>

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407,
        section 3.
    Differs: the average replaces the weights before the end, and the rest of the run updates batch norm statistics,
        in place of a separate pass over the data. The learning rate is only scheduled on request, and not cyclically.
    """

    placement = Placement(
        provides={AVERAGES_WEIGHTS},
        before={SWAPS_WEIGHTS},
        after={CHANGES_LAYERS, REPLACES_MODEL, CHANGES_MEMORY_FORMAT},
        discourages={AVERAGES_WEIGHTS},
    )

    def __init__(
        self,
        swa_start: str | Time[Any] = "0.7dur",
        swa_end: str | Time[Any] = "0.97dur",
        update_interval: str | Time[Any] = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: str = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ) -> None:
        check_flags(schedule_swa_lr=schedule_swa_lr)
        self._times = (swa_start, swa_end, update_interval)
        self.swa_start, self.swa_end = _parse_range(swa_start, swa_end)
        self.update_interval = parse_time("update_interval", update_interval, least=1, example="1ep")
        if self.update_interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
            raise ValueError(f"`update_interval` must be in 'ba' or 'ep', got '{self.update_interval}'. Use '1ep'.")
        self.schedule_swa_lr = schedule_swa_lr
        strategy = _STRATEGIES.get(str(anneal_strategy).lower())
        if strategy is None:
            raise ValueError(f"`anneal_strategy` must be 'linear' or 'cos', got {anneal_strategy!r}.")
        self.anneal_strategy = strategy
        check_integers(anneal_steps=anneal_steps)
        check_finite("Use 1 to jump to `swa_lr`.", anneal_steps=anneal_steps, above=0)
        if swa_lr is not None:
            check_finite("None keeps the learning rate.", swa_lr=swa_lr, least=0)
        self.anneal_steps, self.swa_lr = plain_number(anneal_steps), plain_number(swa_lr)
        if self.swa_end.unit is TimeUnit.DURATION and self.swa_end.value == 1:
            _log.warning("`swa_end` is the end of the run: batch norm statistics will not match the average.")
        self.match_event = Event.BATCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.EPOCH_END
        # Schedulers of the run step before these events; the learning rate is set again after each of their steps.
        self._step_events = {Event.BATCH_END, Event.EPOCH_END} if schedule_swa_lr else {self.match_event}
        self.events = frozenset({Event.INIT, Event.FIT_START, Event.FIT_END, *self._step_events})
        self._reset()

    def _reset(self) -> None:
        self.swa_model: StoredWeights | None = None
        self.swa_scheduler: Annealing | None = None
        self.swa_started = self.swa_completed = False
        self.step_counter = self.num_averaged = 0

    def __repr__(self) -> str:
        swa_start, swa_end, update_interval = self._times
        return (
            f"SWA({swa_start=!r},{swa_end=!r},{update_interval=!r},schedule_swa_lr={self.schedule_swa_lr!r},"
            f"anneal_strategy={self.anneal_strategy!r},anneal_steps={self.anneal_steps!r},swa_lr={self.swa_lr!r})"
        )

    def match(self, event: Event, state: State) -> bool:
        """Return True at INIT, FIT_START and FIT_END, and from `swa_start` on until the average is in the model."""
        if event in (Event.INIT, Event.FIT_START):
            return True
        if event is Event.FIT_END:
            return not self.swa_completed
        if event not in self._step_events or self.swa_completed:
            return False
        return self.swa_started or has_passed(self.swa_start, state)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, set the learning rate, or move the average into the model."""
        if event is Event.INIT:
            self._reset()
        elif event is Event.FIT_START:
            if self.schedule_swa_lr and not self.swa_started:
                _check_optimizers(state)
            warn_of_late_start("SWA", "swa_start", self.swa_start, state)
        elif event is Event.FIT_END:
            self._end_fit(state)
        else:
            if event is self.match_event:
                self._step(state)
            if self.swa_scheduler is not None and not self.swa_completed:
                for optimizer in state.optimizers:
                    self.swa_scheduler.set_lr(optimizer)

    def _step(self, state: State) -> None:
        if self.swa_model is None:
            self.swa_model, self.swa_started = StoredWeights(state.model), True
            self.swa_model.named_buffers_dict.clear()
        if self.schedule_swa_lr and self.swa_scheduler is None:
            _check_optimizers(state)
            self.swa_scheduler = self._annealing_from(float(state.optimizers[0].param_groups[0]["lr"]))
        if self.step_counter % int(self.update_interval) == 0:
            self.num_averaged += 1
            self.swa_model.update(state.model, 1 - 1 / self.num_averaged)
            if self.swa_scheduler is not None:
                self.swa_scheduler.step_count += 1
        self.step_counter += 1
        if has_passed(self.swa_end, state):
            self._finish(state)

    def _end_fit(self, state: State) -> None:
        """Finish a run without an update after `swa_end`, or warn that the model does not hold the average."""
        is_over = has_passed(_WHOLE_RUN, state) or has_passed(self.swa_end, state)
        if self.swa_started and is_over and self.swa_end.unit is TimeUnit.DURATION:
            self._finish(state)
        elif self.swa_started:
            _log.warning(
                "`fit` ended before `swa_end`, which is '%s': the model holds the last weights, not their average. "
                "Continue training, or set an earlier `swa_end`.",
                self.swa_end,
            )
        elif is_over and self.swa_end.unit is TimeUnit.DURATION:
            self._warn_of_few()

    def _warn_of_few(self) -> None:
        warn_no_effect(
            f"`SWA` averaged nothing: {self.num_averaged} updates, of which there is one per `update_interval` "
            f"({self.update_interval}), were between `swa_start` ({self.swa_start}) and `swa_end` ({self.swa_end}). "
            f"Set a shorter interval or an earlier start."
        )

    def _annealing_from(self, lr: float) -> Annealing:
        return Annealing(lr, self.swa_lr, self.anneal_steps, self.anneal_strategy)

    def _finish(self, state: State) -> None:
        assert self.swa_model is not None, "averaging starts before it ends"
        self.swa_model.copy_to(state.model)
        self.swa_completed = True
        if self.swa_scheduler is not None:
            for scheduler in state.schedulers:  # return to the learning rates that they computed last
                get_last_lr = getattr(scheduler, "get_last_lr", None)
                if get_last_lr is not None:
                    _set_lrs(_target_of(scheduler, state), [float(lr) for lr in get_last_lr()])
        elapsed = state.get_elapsed_duration()
        if self.num_averaged < 2:
            self._warn_of_few()
        elif (
            elapsed is not None
            and elapsed.value >= 1
            and any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in state.model.modules())
        ):
            _log.warning(
                "The average became the weights of the model at the end of the run, so batch norm statistics do not "
                "match it. Set an earlier `swa_end` or a shorter `update_interval`."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the schedule of the learning rate and the progress of both."""
        averages: dict[str, torch.Tensor] | None = None
        if self.swa_model is not None:  # the layout is that of `torch.optim.swa_utils.AveragedModel`
            averages = {f"{_PREFIX}{name}": average for name, average in self.swa_model.named_parameters()}
            averages["n_averaged"] = torch.tensor(self.num_averaged)
        return {
            **super().state_dict(),
            "swa_model": averages,
            "swa_completed": self.swa_completed,
            "swa_started": self.swa_started,
            "swa_scheduler": None if self.swa_scheduler is None else self.swa_scheduler.state_dict(),
            "step_counter": self.step_counter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.swa_started, self.swa_completed = state["swa_started"], state["swa_completed"]
        self.step_counter, self.num_averaged = state["step_counter"], 0
        self.swa_model = self.swa_scheduler = None
        if self.swa_started and state["swa_model"] is not None:
            averages = dict(state["swa_model"])
            self.num_averaged = int(averages.pop("n_averaged"))
            named = {name.removeprefix(_PREFIX): average for name, average in averages.items()}
            self.swa_model = StoredWeights(None)
            self.swa_model.load_state_dict({"named_parameters_dict": named, "named_buffers_dict": {}})
        if self.swa_started and state["swa_scheduler"] is not None and self.schedule_swa_lr:
            self.swa_scheduler = self._annealing_from(0.0)
            self.swa_scheduler.load_state_dict(state["swa_scheduler"])


class Annealing:
    """Learning rate that changes to another value within some steps and then stays there.

    After n of N steps it is `start + (swa_lr - start) * a(min(n / N, 1))`, with `a(t) = t` or, for "cos",
    `a(t) = (1 - cos(pi * t)) / 2`.

    Args:
        start: The initial learning rate.
        swa_lr: The final learning rate. None: `start`.
        steps: N.
        strategy: "linear" or "cos".
    """

    def __init__(self, start: float, swa_lr: float | None, steps: int, strategy: str) -> None:
        self.start = start
        self.swa_lr = start if swa_lr is None else swa_lr
        self.steps, self.strategy = steps, strategy
        self.step_count = 0

    def set_lr(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate of all groups of an optimizer."""
        t = min(self.step_count / self.steps, 1.0)
        share = t if self.strategy == "linear" else (1 - math.cos(math.pi * t)) / 2
        _set_lrs(optimizer, [self.swa_lr * share + self.start * (1 - share)] * len(optimizer.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return both learning rates and the number of steps taken."""
        return {"start": self.start, "swa_lr": self.swa_lr, "step_count": self.step_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.start, self.swa_lr, self.step_count = state["start"], state["swa_lr"], state["step_count"]


def _target_of(scheduler: Any, state: State) -> torch.optim.Optimizer:
    """Return the optimizer of a scheduler, which may be inside one of the run and share its groups."""
    target: torch.optim.Optimizer = getattr(scheduler, "optimizer", state.optimizers[0])
    return target


def _set_lrs(optimizer: torch.optim.Optimizer, lrs: Sequence[float]) -> None:
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _parse_range(swa_start: Any, swa_end: Any) -> tuple[Time[Any], Time[Any]]:
    start = parse_time("swa_start", swa_start, least=0, example="0.7dur")
    end = parse_time("swa_end", swa_end, least=0, example="0.97dur")
    if start.unit is not end.unit:
        raise ValueError(f"`swa_start` and `swa_end` must have the same unit, got '{start}' and '{end}'.")
    if start.unit not in (TimeUnit.DURATION, TimeUnit.EPOCH):
        raise ValueError(f"`swa_start` and `swa_end` must be in 'dur' or 'ep', got '{start}'. Use '0.7dur'.")
    if start >= end:
        raise ValueError(f"`swa_start` must be before `swa_end`, got '{start}' and '{end}'.")
    return start, end


def _check_optimizers(state: State) -> None:
    """Raise RuntimeError unless there is a single learning rate to schedule, and at most one scheduler of each."""
    advice = "Use `schedule_swa_lr=False`."
    groups = [id(_target_of(scheduler, state).param_groups) for scheduler in state.schedulers]
    if len({*groups}) < len(groups):
        raise RuntimeError(
            f"`SWA` can schedule the learning rate next to one scheduler per optimizer, got {len(groups)} for "
            f"{len({*groups})}. {advice}"
        )
    rates = {float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups}
    if len(rates) > 1:
        raise RuntimeError(f"`SWA` can schedule one learning rate for all groups, got {sorted(rates)}. {advice}")
