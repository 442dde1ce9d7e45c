"""The algorithm: averages late weights and puts the average into the model before the end."""

from __future__ import annotations

import logging
from typing import Any

from composer.algorithms.swa._annealing import Annealing
from composer.algorithms.swa._arguments import (
    check_run,
    check_steps,
    has_passed,
    parse,
    parse_strategy,
    warn_of_late_start,
)
from composer.algorithms.swa._average import AveragedWeights
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CHANGES_MEMORY_FORMAT,
    REPLACES_MODEL,
    SWAPS_WEIGHTS,
    Algorithm,
    Event,
    Placement,
    State,
    Time,
    TimeUnit,
)
from composer.loggers import Logger
from composer.utils import check_flags, plain_number

__all__ = ["SWA"]

_log = logging.getLogger(__name__)

_WHOLE_RUN = Time(1.0, TimeUnit.DURATION)


class SWA(Algorithm):
    """Averages the weights of late epochs, which lie around a better point than the last of them.

    From `swa_start` on, after every `update_interval`, the weights enter an equal average:
    `average <- average + (weights - average) / (n + 1)`. At the first such moment from `swa_end` on the average becomes
    the model's weights, and training goes on from there, so that batch norm statistics follow. If the run ends before
    there is such a moment, the average becomes the model's weights at FIT_END. Whole batches are over at these moments,
    so microbatches equal one batch.

    With `schedule_swa_lr` the learning rate goes from what it is to `swa_lr` in `anneal_steps` updates and stays there
    until `swa_end`, whatever the run's scheduler says.

    **Events** INIT, FIT_START (checks), BATCH_END or EPOCH_END, with `schedule_swa_lr` both, FIT_END. **Reads** the
    weights, the timestamp. **Writes** the weights, once; learning rates with `schedule_swa_lr`. **Cost** memory for
    another set of weights; one fused pass over them per update. **Compilation** static; nothing waits for the device.
    **When not to use it** together with another method that averages weights.

    Args:
        swa_start: When averaging starts, in "dur" or "ep".
        swa_end: When the average becomes the model's weights, in the same unit. The rest of the run should hold at
            least one whole `update_interval`, or batch norm statistics are not those of the average.
        update_interval: The time between updates, in "ba" or "ep".
        schedule_swa_lr: Whether to schedule the learning rate.
        anneal_strategy: "linear" or "cos".
        anneal_steps: The number of updates until `swa_lr` is reached.
        swa_lr: The learning rate to go to; None: the one at the start.

    Attributes:
        swa_model: The averages; None before `swa_start`.
        swa_scheduler: The learning rate; None unless it is scheduled.
        swa_started: Whether averaging has started.
        swa_completed: Whether the average is in the model.
        step_counter: The number of batches or epochs since the start.
        match_event: BATCH_END or EPOCH_END.

    Raises:
        ValueError: Times have other units, are not in order or not within the run, or another argument is out of range.
        RuntimeError: At FIT_START, with `schedule_swa_lr`, if there are several optimizers, schedulers or learning
            rates.

    Example:
        >>> SWA(update_interval="100ba").match_event
        <Event.BATCH_END: 'batch_end'>

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407,
        section 3.
    Differs: the average replaces the weights before the end, and the rest of the run refreshes batch norm statistics,
        in place of a pass over the data. The learning rate is only scheduled on request, and not cyclically.
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
        self._given = (swa_start, swa_end, update_interval)
        self.swa_start, self.swa_end, self.update_interval = parse(*self._given)
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy = parse_strategy(anneal_strategy)
        check_steps(anneal_steps, swa_lr)
        self.anneal_steps, self.swa_lr = plain_number(anneal_steps), plain_number(swa_lr)
        if self.swa_end.unit is TimeUnit.DURATION and self.swa_end.value == 1:
            _log.warning("`swa_end` is the end of the run: batch norm statistics will not be those of the average.")
        self.match_event = Event.BATCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.EPOCH_END
        # Schedulers of the run step before either event, and must not have the last word.
        self._acting = {Event.BATCH_END, Event.EPOCH_END} if schedule_swa_lr else {self.match_event}
        self.events = frozenset({Event.INIT, Event.FIT_START, Event.FIT_END, *self._acting})
        self._reset()

    def _reset(self) -> None:
        self.swa_model: AveragedWeights | None = None
        self.swa_scheduler: Annealing | None = None
        self.swa_started = self.swa_completed = False
        self.step_counter = 0

    def __repr__(self) -> str:
        swa_start, swa_end, update_interval = self._given
        return (
            f"SWA({swa_start=!r},{swa_end=!r},{update_interval=!r},schedule_swa_lr={self.schedule_swa_lr!r},"
            f"anneal_strategy={self.anneal_strategy!r},anneal_steps={self.anneal_steps!r},swa_lr={self.swa_lr!r})"
        )

    def match(self, event: Event, state: State) -> bool:
        """At INIT, FIT_START and FIT_END, and from `swa_start` on until the average is in the model."""
        if event in (Event.INIT, Event.FIT_START):
            return True
        if event is Event.FIT_END:
            return not self.swa_completed
        if event not in self._acting or self.swa_completed:
            return False
        return self.swa_started or has_passed(self.swa_start, state)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Average, hold the learning rate, or finish."""
        if event is Event.INIT:
            self._reset()
        elif event is Event.FIT_START:
            if self.schedule_swa_lr and not self.swa_started:
                check_run(state)
            warn_of_late_start(self.swa_start, state)
        elif event is Event.FIT_END:
            self._end_fit(state)
        else:
            if event is self.match_event:
                self._advance(state)
            if self.swa_scheduler is not None and not self.swa_completed:
                self.swa_scheduler.set_on(state.optimizers[0])

    def _advance(self, state: State) -> None:
        if self.swa_model is None:
            self.swa_model, self.swa_started = AveragedWeights(), True
        if self.schedule_swa_lr and self.swa_scheduler is None:
            check_run(state)
            self.swa_scheduler = self._annealing_from(float(state.optimizers[0].param_groups[0]["lr"]))
        if self.step_counter % int(self.update_interval) == 0:
            self.swa_model.update(state.model)
            if self.swa_scheduler is not None:
                self.swa_scheduler.step()
        self.step_counter += 1
        if has_passed(self.swa_end, state):
            self._finish(state)

    def _end_fit(self, state: State) -> None:
        """Finish a run that had no update after `swa_end`; say so if that leaves the last weights in the model."""
        is_over = has_passed(_WHOLE_RUN, state) or has_passed(self.swa_end, state)
        if self.swa_started and is_over and self.swa_end.unit is TimeUnit.DURATION:
            self._finish(state)
        elif self.swa_started:
            _log.warning(
                "`fit` ended before `swa_end`, which is '%s': the model holds the last weights, not their average. "
                "Train on, or make `swa_end` earlier.",
                self.swa_end,
            )
        elif is_over and self.swa_end.unit is TimeUnit.DURATION:
            _log.warning(
                "`SWA` averaged nothing: no `update_interval` (%s) ended between `swa_start` (%s) and the end of the "
                "run. Make either shorter.",
                self.update_interval,
                self.swa_start,
            )

    def _annealing_from(self, lr: float) -> Annealing:
        return Annealing(lr, self.swa_lr, self.anneal_steps, self.anneal_strategy)

    def _finish(self, state: State) -> None:
        assert self.swa_model is not None, "averaging starts before it ends"
        self.swa_model.transfer(state.model)
        self.swa_completed = True
        if self.swa_scheduler is not None:
            self.swa_scheduler.release(state.optimizers[0], state.schedulers)
        elapsed = state.get_elapsed_duration()
        if elapsed is not None and elapsed.value >= 1:
            _log.warning(
                "The average became the model's weights at the end of the run, so batch norm statistics are not its. "
                "Make `swa_end` earlier, or `update_interval` shorter."
            )

    def state_dict(self) -> dict[str, Any]:
        """The averages, the schedule, and how far they are."""
        return {
            **super().state_dict(),
            "swa_model": None if self.swa_model is None else self.swa_model.state_dict(),
            "swa_completed": self.swa_completed,
            "swa_started": self.swa_started,
            "swa_scheduler": None if self.swa_scheduler is None else self.swa_scheduler.state_dict(),
            "step_counter": self.step_counter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.swa_started, self.swa_completed = state["swa_started"], state["swa_completed"]
        self.step_counter = state["step_counter"]
        self.swa_model = self.swa_scheduler = None
        if self.swa_started and state["swa_model"] is not None:
            self.swa_model = AveragedWeights()
            self.swa_model.load_state_dict(state["swa_model"])
        if self.swa_started and state["swa_scheduler"] is not None and self.schedule_swa_lr:
            self.swa_scheduler = self._annealing_from(0.0)
            self.swa_scheduler.load_state_dict(state["swa_scheduler"])
