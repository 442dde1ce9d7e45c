"""The algorithm `ScheduleFree`, which replaces the optimizers of a run and swaps their averages in at events.

Symbols: y are the training weights, x their average, z the weights of the base optimizer.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.schedule_free.optimizers import (
    ExactModes,
    build_schedule_free,
    check_momentum,
    restore_exactly,
    weight_of_x,
)
from composer.algorithms.schedule_free.schedules import check_schedulers, has_fallen
from composer.algorithms.utils.batchnorm import BatchNormRecalibration
from composer.algorithms.utils.stored_weights import StoredWeights, reshard
from composer.algorithms.utils.weight_swaps import RESTORE_EVENTS, SwapTimes, parse_time, run_length, warn_of_changes
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CHANGES_MEMORY_FORMAT,
    DECAYS_WEIGHTS,
    DISPLACES_WEIGHTS,
    FREEZES_WEIGHTS,
    PINS_NORMS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    SWAPS_WEIGHTS,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
    Time,
    TimeUnit,
)
from composer.utils import check_finite, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def _parse_warmup(given: Any) -> Time[Any]:
    if isinstance(given, str):
        try:
            given = Time.from_input(given)
        except ValueError:
            raise ValueError(
                f"`warmup` must be a number of batches ('ba') or epochs ('ep'), got {given!r}. Write for example "
                f"'1000ba'."
            ) from None
    return parse_time("warmup", given, least=0)


class ScheduleFree(Algorithm):
    """Schedule-Free training: no decay of the learning rate; the average of all weights is evaluated and saved.

    At INIT each AdamW, Adam and SGD of the run is replaced by its schedule-free counterpart, with the same parameter
    groups, learning rates and weight decays, and the steps of any other optimizer, such as that of `Muon`, move z; see
    `build_schedule_free`. An optimizer of `schedulefree` is kept. Then the average x is in the model during evaluations
    and predictions, when a checkpoint is saved, and after `fit`; the training weights y return before training
    continues, bit for bit. So the run can end at any time, and every checkpoint holds the weights to use. Resuming from
    it is exact.

    The statistics of batch norm layers belong to y, so they are measured again for x, with `recalibration_batches`
    training batches, once for each x that is swapped in.

    **Events** INIT (replacement); AFTER_LOAD, FIT_START, BATCH_START, BATCH_END, EPOCH_END (checks); EVAL_START,
    PREDICT_START, BATCH_CHECKPOINT, EPOCH_CHECKPOINT, ITERATION_CHECKPOINT, FIT_END (x in); EVAL_END and PREDICT_END
    after x was swapped in for them, and the first of FIT_START, ITERATION_START, EPOCH_START, BEFORE_DATALOADER,
    BATCH_START, EPOCH_END, ITERATION_END (y back). **Reads** the model, the schedulers, the training data, and the
    `save_interval(state, event)` of callbacks. **Writes** `state.optimizers`; the model's weights, between the swaps
    and at the end. **Cost** no memory beyond that of AdamW, or of SGD with momentum, and a copy of the weights beyond
    that of other optimizers; another copy while x is in the model; with batch norm layers, forward passes of
    `recalibration_batches` batches per x. **Compilation** static: the graphs of the model do not change; recalibration
    runs uncompiled.

    **When not to use it** with a schedule that lowers the learning rate; to fine-tune in a few steps, where the average
    of all weights still holds the first ones; with weights in lower precision than float32 (use `precision` of the
    Trainer instead), in which small updates round to nothing.

    Args:
        warmup: The time in which the learning rate rises from 0, in "ba" or "ep"; None: no warmup.
        lr: Learning rate of all groups. None: that of each. The best is 1 to 10 times that of AdamW with a schedule,
            and 10 to 50 times that of SGD.
        weight_decay: Weight decay of all groups. None: that of each.
        momentum: The weight of x in y, in (0, 1). None: the momentum, or first beta, of each group of AdamW and SGD;
            0.9 if that is 0, and for other optimizers.
        r: How much more late steps count in the average: in proportion to k**r.
        weight_lr_power: How much more steps at a high learning rate count.
        recalibration_batches: How many training batches measure the batch norm statistics of x. 0: x is evaluated with
            those of y.
        recalibration_data: A loader of batches for that, or a list of them. None: the training data, which must be a
            `DataLoader` of an indexed dataset or a list, as iterating must not disturb training.

    Attributes:
        swapped: True if x is in the model of the run for an evaluation, a checkpoint or the end of `fit`.

    Raises:
        ValueError: An argument is out of range. At INIT: an optimizer cannot be replaced, or settings are given for
            optimizers that are schedule-free already. At AFTER_LOAD or FIT_START: a scheduler lowers the learning
            rate. At FIT_START: there are batch norm layers, but the training data cannot be iterated beside training.
        TypeError: An argument has another type; at INIT, an optimizer needs a closure, or has modes of its own.

    Warns:
        NotIntendedUseWarning: The learning rate has fallen.
        UserWarning: The run ends before the warmup.

    Example:
        >>> ScheduleFree(warmup="1000ba").swapped
        False

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1 and section 4.
    Differs: y is kept and restored, not computed from x, which rounds. Batch norm statistics are also measured before
        each checkpoint. Weights that are frozen during the run keep x.
    """

    placement = Placement(
        provides={REPLACES_OPTIMIZER, AVERAGES_WEIGHTS, SWAPS_WEIGHTS},
        after={CHANGES_LAYERS, CHANGES_MEMORY_FORMAT, REPLACES_MODEL, FREEZES_WEIGHTS, REPLACES_OPTIMIZER},
        before={WRAPS_OPTIMIZER},
        # Those that act around a step change the weights that it has made; this optimizer steps others, and would
        # overwrite them.
        excludes={AVERAGES_WEIGHTS, SWAPS_WEIGHTS, DISPLACES_WEIGHTS, PINS_NORMS, DECAYS_WEIGHTS},
    )

    def __init__(
        self,
        warmup: str | Time[Any] | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        recalibration_batches: int = 50,
        recalibration_data: Any = None,
    ) -> None:
        self._warmup = None if warmup is None else _parse_warmup(warmup)
        if self._warmup is not None and self._warmup.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
            raise ValueError(f"`warmup` must be in 'ba' or 'ep', got '{self._warmup}'. Use '1000ba'.")
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value is not None:
                check_finite(least=0, **{name: value})
        if momentum is not None:
            check_momentum(momentum)
        check_finite("Use 0 and 2.", r=r, weight_lr_power=weight_lr_power, least=0)
        self.warmup = None if self._warmup is None else str(self._warmup)
        self.lr, self.weight_decay, self.momentum = plain_number(lr), plain_number(weight_decay), plain_number(momentum)
        self.r, self.weight_lr_power = plain_number(r), plain_number(weight_lr_power)
        self._recalibration = BatchNormRecalibration("ScheduleFree", recalibration_batches, recalibration_data)
        self.recalibration_batches, self.recalibration_data = int(recalibration_batches), recalibration_data
        self._swaps = SwapTimes(predictions=True)
        self.events = self._swaps.events | {Event.INIT, Event.BATCH_END}
        self._reset()

    def _reset(self) -> None:
        self._statistics: dict[str, torch.Tensor] | None = None  # batch norm of y, while x is in the model
        self._switched: list[ExactModes] = []  # they were in train mode when x was swapped in
        # The parameters that are trained, with their z and the weight of x in y, and the number of states then.
        self._trained: dict[torch.Tensor, tuple[ExactModes, torch.Tensor, float]] = {}
        self._num_entries = 0
        self._replaced: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]] = []  # old and new one
        self._left: StoredWeights | None = None  # set after `fit`: detects changes of the weights in the model
        self._has_warned = False

    @property
    def swapped(self) -> bool:
        """True if x is in the model of the run for an evaluation, a checkpoint or the end of `fit`."""
        return self._statistics is not None

    def __repr__(self) -> str:
        data = None if self.recalibration_data is None else f"{type(self.recalibration_data).__name__}(...)"
        return (
            f"ScheduleFree(warmup={self.warmup!r},lr={self.lr!r},weight_decay={self.weight_decay!r},"
            f"momentum={self.momentum!r},r={self.r!r},weight_lr_power={self.weight_lr_power!r},"
            f"recalibration_batches={self.recalibration_batches!r},recalibration_data={data})"
        )

    def match(self, event: Event, state: State) -> bool:
        """Return True if there is something to replace, check or swap."""
        if event in _ALWAYS:
            return True
        optimizers = _schedule_free(state)
        if event in RESTORE_EVENTS and not all(group["train_mode"] for o in optimizers for group in o.param_groups):
            return True
        return self._swaps.match(event, state, ready=_count_steps(optimizers) > 0, swapped=self.swapped)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the optimizers, check the schedule, or swap x in or out."""
        if event is Event.INIT:
            self._reset()
            self._replace(state)
            return
        optimizers = _schedule_free(state)
        if event in (Event.AFTER_LOAD, Event.FIT_START):
            for old, new in self._replaced:  # loading makes new groups; schedulers may have the old optimizer
                old.param_groups = new.param_groups
            check_schedulers(state, [group for optimizer in optimizers for group in optimizer.param_groups])
        if event is Event.FIT_START:
            self._start(state, optimizers)
        elif event is Event.BATCH_END:
            self._recalibration.observe(state)
            self._warn_if_fallen(optimizers)
        if event in _FREEZING:
            self._average_frozen(optimizers, refresh=event is Event.FIT_START)
        if self._swaps.is_due(event, swapped=self.swapped):
            if self._statistics is not None:
                self._leave(state, self._statistics)
            else:
                self._enter(state, optimizers)
        if event in RESTORE_EVENTS:
            for optimizer in optimizers:
                optimizer.train()
        if event in (Event.AFTER_LOAD, Event.FIT_END) and self.swapped:
            self._left = StoredWeights(None)
            self._left.named_parameters_dict = {name: entry["y"] for name, _, entry in _entries(state) if "y" in entry}
            self._left.swapped = True
            self._left.record_checksums(state.model)

    # ---- before training ----

    def _replace(self, state: State) -> None:
        settings = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}
        settings |= {"r": self.r, "weight_lr_power": self.weight_lr_power}
        optimizers: list[torch.optim.Optimizer] = []
        for optimizer in state.optimizers:
            inner = _innermost(optimizer)
            if restore_exactly(inner):
                optimizers.append(optimizer)
                continue
            if inner is not optimizer:
                raise ValueError(
                    f"`ScheduleFree` must replace an optimizer that is not wrapped, got {type(optimizer).__name__} "
                    f"around {type(inner).__name__}. Pass {type(inner).__name__} as `optimizers`, and use an "
                    f"algorithm, such as `SAM`, in place of the wrapper; or wrap an optimizer of `schedulefree`."
                )
            optimizers.append(build_schedule_free(optimizer, **settings))  # type: ignore[arg-type]
            self._replaced.append((optimizer, optimizers[-1]))
        given = [name for name, value in (settings | {"warmup": self.warmup}).items() if value != _DEFAULTS[name]]
        if optimizers and not self._replaced and given:
            raise ValueError(
                f"`{given[0]}` must be set where the optimizers are made, because they are schedule-free already, got "
                f"{getattr(self, given[0])!r}. Leave it out, or pass AdamW or SGD as `optimizers`."
            )
        state.optimizers = optimizers

    def _start(self, state: State, optimizers: list[ExactModes]) -> None:
        """Check the data and the learning rate, set the warmup, and adopt weights changed since `fit` ended."""
        self._recalibration.check(state)
        replaced = [old for old, _ in self._replaced]
        for scheduler in state.schedulers if self.lr is not None else ():
            if getattr(scheduler, "optimizer", None) in replaced and any(
                rate != self.lr for rate in scheduler.base_lrs
            ):
                raise ValueError(
                    f"`lr` must be None with a scheduler that was made for the replaced optimizer, got {self.lr!r}: "
                    f"{type(scheduler).__name__} sets the learning rate to {scheduler.base_lrs[0]!r} times its factor. "
                    f"Set the learning rate of the optimizer, or use a schedule of `composer.optim`."
                )
        for _, new in self._replaced if self._warmup is not None else ():
            for group in new.param_groups:
                if not group["k"]:
                    group["warmup_steps"] = self._warmup_steps(state)
        length = run_length(state, TimeUnit.BATCH)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        warmup = max((group.get("warmup_steps", 0) for group in groups), default=0)
        if length is not None and warmup > length:
            warnings.warn(
                f"The warmup of `{type(self).__name__}` takes {warmup} batches, but the run ends before, at "
                f"'{state.max_duration}': the learning rate never reaches its value. Use a shorter warmup.",
                stacklevel=2,
            )
        left, self._left = self._left, None
        changed = [] if left is None else left.adopt_changes(state.model)
        warn_of_changes(changed)
        for name, parameter, entry in _entries(state) if changed else ():
            if name in changed:
                entry["y"].copy_(parameter.detach())
                entry["z"].copy_(parameter.detach())
        if changed:
            self._recalibration.load_state_dict({})  # the statistics are of other weights

    def _warmup_steps(self, state: State) -> int:
        assert self._warmup is not None, "there is a warmup"
        if self._warmup.unit is TimeUnit.BATCH:
            return int(self._warmup)
        if state.dataloader_len is None:
            raise ValueError(
                f"`warmup` must be in 'ba' if the length of the training data is unknown, got '{self._warmup}'."
            )
        return int(self._warmup) * int(state.dataloader_len)

    def _warn_if_fallen(self, optimizers: list[ExactModes]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        fallen = next((group for group in groups if has_fallen(group["scheduled_lr"], group["lr_max"])), None)
        if fallen is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The learning rate of `{type(self).__name__}` has fallen from {fallen['lr_max']:.4g} to "
                f"{fallen['scheduled_lr']:.4g}. The average takes the place of a decay: keep the rate constant after a "
                f"warmup.",
                NotIntendedUseWarning,
                stacklevel=2,
            )

    # ---- swapping ----

    def _enter(self, state: State, optimizers: list[ExactModes]) -> None:
        reshard(state.model)
        self._switched = [o for o in optimizers if any(group["train_mode"] for group in o.param_groups)]
        for optimizer in self._switched:
            optimizer.eval()
        self._statistics = self._recalibration.training_statistics(state.model)
        self._recalibration.enter(state, _count_steps(optimizers))

    def _leave(self, state: State, statistics: dict[str, torch.Tensor]) -> None:
        reshard(state.model)
        for optimizer in self._switched:
            optimizer.train()
        self._recalibration.restore(state.model, statistics)
        self._statistics, self._switched = None, []

    @torch.no_grad()
    def _average_frozen(self, optimizers: list[ExactModes], refresh: bool) -> None:
        """Put x into the parameters that were frozen and removed from the optimizers: they are no longer swapped."""
        num_entries = sum(len(optimizer.state) for optimizer in optimizers)
        if num_entries == self._num_entries and not refresh:
            return
        trained = {
            parameter: (optimizer, entry["z"], weight_of_x(group))
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if "z" in (entry := optimizer.state.get(parameter, {}))
        }
        for parameter, (optimizer, z, weight) in self._trained.items():
            is_frozen = parameter not in trained and not parameter.requires_grad
            if is_frozen and all(group["train_mode"] for group in optimizer.param_groups):
                parameter.lerp_(z, 1 - 1 / weight)
        self._trained, self._num_entries = trained, num_entries

    def state_dict(self) -> dict[str, Any]:
        """Return the batch norm statistics of y while x is in the model; the optimizers save y, z and the average."""
        return {
            **super().state_dict(),
            "training": None if self._statistics is None else {"named_buffers_dict": dict(self._statistics)},
            "recalibration": self._recalibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load copies of the result of `state_dict`."""
        training = state["training"]
        self._statistics, self._switched, self._left = None, [], None
        if training is not None:
            self._statistics = {name: value.detach().clone() for name, value in training["named_buffers_dict"].items()}
        self._recalibration.load_state_dict(state["recalibration"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_switched": [], "_trained": {}, "_replaced": [], "_left": None}  # a copy has no run


# Parameters may have been frozen just before, by algorithms that this one is placed after.
_FREEZING = (Event.FIT_START, Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END)
_ALWAYS = (Event.INIT, Event.AFTER_LOAD, *_FREEZING)
_DEFAULTS = {name: p.default for name, p in inspect.signature(ScheduleFree).parameters.items()}


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the innermost optimizer of a wrapper, or the optimizer itself."""
    while isinstance(base := getattr(optimizer, "base_optimizer", None), torch.optim.Optimizer):
        optimizer = base
    return optimizer


def _schedule_free(state: State) -> list[ExactModes]:
    """Return the schedule-free optimizers of a run, without their wrappers."""
    return [inner for o in state.optimizers if isinstance(inner := _innermost(o), ExactModes)]


def _count_steps(optimizers: list[ExactModes]) -> int:
    steps: int = sum(group["k"] for optimizer in optimizers for group in optimizer.param_groups)
    return steps


def _entries(state: State) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Return name, parameter and optimizer state of the parameters that were trained."""
    entries = {parameter: entry for optimizer in _schedule_free(state) for parameter, entry in optimizer.state.items()}
    return [(name, p, entries[p]) for name, p in unwrapped_model(state.model).named_parameters() if entries.get(p)]
