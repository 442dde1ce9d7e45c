"""What both the constructor and `fit` can set: data, evaluators, duration, schedules, gradient scaling."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import DataSpec, Evaluator, Precision, State, Time, Timestamp, TimeUnit
from composer.models import ComposerModel
from composer.trainer import _construction as build
from composer.trainer._lockstep import check_whole
from composer.trainer._parallel import SingleProcess
from composer.trainer._profiling import check_not_profiled
from composer.trainer._scaler import ClosureGradScaler
from composer.trainer._train_batch import needs_closure
from composer.utils import ensure_tuple

__all__ = ["RunSettings"]


class RunSettings:
    """Puts arguments of the Trainer onto the state, checked.

    Args:
        state: The run's state.
        model: The user's model, which says what is measured.
        parallel: What other processes do.
    """

    def __init__(self, state: State, model: ComposerModel, parallel: SingleProcess) -> None:
        self.state, self.model, self.parallel = state, model, parallel
        self.train_spec: DataSpec | None = None
        self.train_label = "train"
        self.step_every_batch = True
        # Schedules that wait for the length of the run, and their ratio.
        self._waiting: tuple[Sequence[Any], float] | None = None
        self.given_schedulers: Sequence[Any] = ()

    @property
    def is_complete(self) -> bool:
        """Whether there is all that the constructor can set, with no schedule waiting for more."""
        return self._waiting is None and self.train_spec is not None

    def set_train_data(self, dataloader: Any, label: str, subset: Any, microbatch_size: Any) -> None:
        """Make a loader the training data; None: there is none yet."""
        state = self.state
        self.train_spec = None if dataloader is None else build.data_spec_of(dataloader, "train_dataloader")
        self.train_label = label
        self._set_microbatch_size(microbatch_size)
        if self.train_spec is not None:
            self.parallel.check_loader(self.train_spec.dataloader, "train_dataloader")
            build.check_trainable(self.model)
            state.train_dataloader = self.train_spec.dataloader
            subset = build.check_subset("train_subset_num_batches", subset)
            self._activate(self.train_spec.dataloader, subset)

    def replace_train_data(self, dataloader: Any, label: str | None, subset: Any, microbatch_size: Any) -> None:
        """What of the training data `fit` was given; None leaves it as it is.

        Raises:
            ValueError: There is still no training data.
        """
        if dataloader is not None:
            self.set_train_data(
                dataloader, "train" if label is None else label, -1 if subset is None else subset, microbatch_size
            )
        elif self.train_spec is None:
            raise ValueError("No `train_dataloader` was given. Pass it to the `Trainer` or to `fit`.")
        else:
            if microbatch_size is not None:
                self._set_microbatch_size(microbatch_size)
            if subset is not None:
                subset = build.check_subset("train_subset_num_batches", subset)
            if label is not None:
                self.train_label = label
            if subset is not None or label is not None:
                length = self.state._train_dataloader_len
                kept = -1 if length is None else length
                self._activate(self.train_spec.dataloader, kept if subset is None else subset)

    def _set_microbatch_size(self, asked: Any) -> None:
        state = self.state
        if asked == "auto":
            check_not_profiled(state.profiler, asked)
            check_whole("device_train_microbatch_size", state)
        size, auto = build.microbatch_size(asked, self.train_spec, state.device)
        state.device_train_microbatch_size, state.auto_microbatching = size, auto

    def _activate(self, dataloader: Any, subset: int) -> None:
        """Make the training loader the active one, with the length that all ranks can train."""
        state = self.state
        state.set_dataloader(dataloader, self.train_label, subset)
        own = None if state.dataloader_len is None else state.dataloader_len.value
        length = self.parallel.shortest(own)
        if length is not None and length != own:
            state.dataloader_len = length

    def set_evaluators(self, eval_dataloader: Any, interval: Any, subset: Any) -> None:
        """Replace what is evaluated."""
        evaluators = self.evaluators_of(eval_dataloader, interval, subset)
        for evaluator in evaluators:
            loader = evaluator.dataloader.dataloader
            if build.is_used_up_by_iterating(loader):
                raise ValueError(
                    f"`eval_dataloader` must be a loader that can be iterated in every evaluation, got a "
                    f"{type(loader).__name__} for {evaluator.label!r}, which can be iterated only once. Pass a "
                    f"`DataLoader`, a list, or an object whose `__iter__` begins anew."
                )
        self.state.evaluators = evaluators

    def replace_evaluation(self, eval_dataloader: Any, interval: Any, subset: Any) -> None:
        """What of the evaluation `fit` was given; None leaves it, or is the constructor's default for a new loader.

        Raises:
            ValueError: There is nothing that the interval or the number of batches could be for.
        """
        if eval_dataloader is not None:
            self.set_evaluators(eval_dataloader, 1 if interval is None else interval, -1 if subset is None else subset)
            return
        given = {"eval_interval": interval, "eval_subset_num_batches": subset}
        names = [f"`{name}`" for name, value in given.items() if value is not None]
        if names and not self.state.evaluators:
            raise ValueError(
                f"{' and '.join(names)} must not be given without something to evaluate. Pass `eval_dataloader` to the "
                f"`Trainer` or to `fit`."
            )
        if subset is not None:
            subset = build.check_subset("eval_subset_num_batches", subset)
        values = {"eval_interval": interval, "subset_num_batches": subset}
        for evaluator in self.state.evaluators:
            evaluator._inherit(**{name: value for name, value in values.items() if value is not None})

    def evaluators_of(self, eval_dataloader: Any, interval: Any, subset: Any) -> list[Evaluator]:
        """Evaluators of an argument, with fresh metrics on the state."""
        evaluators = build.build_evaluators(eval_dataloader, interval, subset)
        for evaluator in evaluators:
            self.parallel.check_loader(evaluator.dataloader.dataloader, "eval_dataloader")
        self.measure(evaluators)
        return evaluators

    def measure(self, evaluators: Sequence[Evaluator]) -> None:
        """Give the state fresh metrics of the model for these evaluators."""
        for evaluator in evaluators:
            metrics = copy.deepcopy(self.model.get_metrics(is_train=False))
            self.parallel.adopt_metrics(metrics.values())
            self.state.eval_metrics[evaluator.label] = evaluator.select_metrics(metrics)

    def set_max_duration(self, max_duration: Any, ratio: float) -> None:
        """Set the length of the run, scaled by `ratio`; None leaves it open.

        Raises:
            ValueError: It cannot work, or `ratio` makes it zero.
        """
        if max_duration is not None:
            parsed = build.check_duration(max_duration, "max_duration")
            self._check_iterations(parsed, "max_duration")
            self.state.max_duration = _scaled(parsed, ratio, "max_duration")
            self._check_epochs()

    def _check_iterations(self, duration: Time[Any], argument: str) -> None:
        if duration.unit is TimeUnit.ITERATION and self.state._iteration_length is None:
            raise ValueError(
                f"`{argument}` must not be in iterations, got {str(duration)!r}: the run has none, so it would not "
                f"end. Use for example '10ep' or '1000ba'."
            )

    def set_duration(self, duration: Any, ratio: float, begun: Timestamp | None = None) -> None:
        """Train `duration` more from here on; None: until `max_duration`.

        Args:
            duration: How much more.
            ratio: Scales how much this call of `fit` trains, not what was trained before it.
            begun: When this call of `fit` had begun in the run that is continued, of which nothing may be left but its
                end; None: it begins now.

        Raises:
            ValueError: There is no length, it is reached already, or `ratio` leaves nothing of it.
        """
        state = self.state
        start = state.timestamp if begun is None else begun
        if duration is not None:
            more = build.check_duration(duration, "duration")
            self._check_iterations(more, "duration")
            state.max_duration = start.get(more.unit) + _scaled(more, ratio, "duration")
        limit = state.max_duration
        if limit is None:
            raise ValueError("No `max_duration` was given. Pass it to the `Trainer`, or `duration` to `fit`.")
        if state.timestamp >= limit and begun is None:
            raise ValueError(
                f"The run is already at its `max_duration` of {str(limit)!r}. Please provide the `duration` or specify "
                f"`reset_time=True` to `fit`, or raise `trainer.state.max_duration`."
            )
        if duration is None and ratio != 1.0:
            begin = start.get(limit.unit)
            if limit > begin:
                state.max_duration = begin + _scaled(limit - begin, ratio, "max_duration")
        self._check_epochs()

    def check_schedulers(self, schedulers: Any, ratio: float, every_batch: bool | None) -> None:
        """Check what `set_schedulers` is to be given, and that there is something for `ratio` to scale.

        Raises:
            TypeError: `schedulers` are none.
            ValueError: Another argument cannot work, or has no effect.
        """
        if isinstance(schedulers, Mapping):
            raise TypeError(f"`schedulers` must be a scheduler or a sequence of them, got {schedulers!r}.")
        given = ensure_tuple(schedulers)
        if not given:
            if ratio != 1.0:
                raise ValueError(f"`scale_schedule_ratio` must be 1.0 without `schedulers`, got {ratio!r}.")
            if every_batch is not None:
                raise ValueError("`step_schedulers_every_batch` has no effect without `schedulers`. Leave it out.")
            return
        build.check_schedulers(given, self.state.optimizers)

    def set_schedulers(self, schedulers: Any, ratio: float, every_batch: bool | None) -> None:
        """Replace the schedules, scaled by `ratio` as the length of the run is already; None leaves them."""
        state, given = self.state, ensure_tuple(schedulers)
        if not given:
            return
        own = any(isinstance(scheduler, LRScheduler) for scheduler in given)
        self.step_every_batch = not own if every_batch is None else every_batch
        self._waiting, self.given_schedulers = (given, ratio), given
        if state.max_duration is not None and self.train_spec is not None:
            self.compile_schedulers()

    def compile_schedulers(self) -> None:
        """Build the schedules that had to wait until the length of the run and its data were known."""
        if self._waiting is not None:
            given, ratio = self._waiting
            self._waiting = None
            self.state.schedulers = build.build_schedulers(given, self.state, ratio)
            self._check_lengths(scheduler for scheduler in given if isinstance(scheduler, LRScheduler))

    def _check_lengths(self, schedulers: Iterable[LRScheduler]) -> None:
        """Warn of a torch scheduler whose length counts other steps than those it will take."""
        steps = self._steps_of_run()
        if steps is None:
            return
        unit, other = ("batch", "epoch") if self.step_every_batch else ("epoch", "batch")
        way_out = (
            "Leave out `step_schedulers_every_batch`."
            if self.step_every_batch
            else ("Pass `step_schedulers_every_batch=True`.")
        )
        for scheduler in schedulers:
            name = next((name for name in ("total_steps", "T_max") if hasattr(scheduler, name)), None)
            if name is None:
                continue
            length, given = getattr(scheduler, name), f"`{type(scheduler).__name__}` has {name}="
            if length != steps[unit] and length == steps[other]:
                warnings.warn(
                    f"{given}{length}, one step per {other} of the run, but takes one per {unit}, "
                    f"{steps[unit]} in all. {way_out}",
                    stacklevel=5,
                )
            elif name == "total_steps" and length < steps[unit]:
                warnings.warn(
                    f"{given}{length} and fails after these, but takes one step per {unit}, {steps[unit]} in all. "
                    f"Give it {name}={steps[unit]}.",
                    stacklevel=5,
                )

    def _steps_of_run(self) -> dict[str, int] | None:
        """Return how many batches and epochs are left to train; None if that is not known."""
        limit, per_epoch = self.state.max_duration, self.state.dataloader_len
        if limit is None or per_epoch is None or limit.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            return None
        left = (limit - self.state.timestamp.get(limit.unit)).value
        if limit.unit is TimeUnit.EPOCH:
            return {"epoch": left, "batch": left * per_epoch.value}
        return {"epoch": left // per_epoch.value, "batch": left}

    def set_scaler(self) -> None:
        """Scale gradients in fp16, and only there."""
        state = self.state
        self.parallel.check_precision(state.precision)
        state.scaler = None
        if state.precision is Precision.AMP_FP16:
            closure = any(needs_closure(optimizer) for optimizer in state.optimizers)
            kind = ClosureGradScaler if closure else torch.amp.GradScaler
            state.scaler = kind("cuda" if state.device.name == "gpu" else state.device.name)

    def _check_epochs(self) -> None:
        """Refuse several epochs over what can be iterated only once."""
        state, limit = self.state, self.state.max_duration
        if limit is None or limit.unit is not TimeUnit.EPOCH or self.train_spec is None:
            return
        loader, epochs = self.train_spec.dataloader, limit.value - state.timestamp.epoch.value
        if epochs > 1 and build.is_used_up_by_iterating(loader):
            raise ValueError(
                f"`train_dataloader` must be a loader that can be iterated {epochs} times for `max_duration` "
                f"{str(limit)!r}, got a {type(loader).__name__}, which can be iterated only once. Pass a `DataLoader`, "
                f"a list, or an object whose `__iter__` begins anew."
            )


def _scaled(duration: Time[Any], ratio: float, argument: str) -> Time[Any]:
    """Return a length of training times `scale_schedule_ratio`."""
    scaled = duration if ratio == 1.0 else duration * float(ratio)
    if scaled.value <= 0:
        raise ValueError(
            f"`scale_schedule_ratio` {ratio!r} makes `{argument}` {str(duration)!r} zero. Use a larger one."
        )
    return scaled
