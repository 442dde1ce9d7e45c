"""The settings of a run that both the constructor and `fit` can change: data, evaluators, length, schedules, scaler."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import (
    DataSpec,
    Evaluator,
    Precision,
    State,
    Time,
    Timestamp,
    TimeUnit,
    ensure_data_spec,
)
from composer.core.data_spec import check_ends, check_microbatch_size, is_endless
from composer.devices import Device
from composer.models import ComposerModel
from composer.models.module_with_loss import user_model_name
from composer.optim import compile_composer_scheduler, scale_pytorch_scheduler
from composer.trainer.microbatch import check_not_profiled, check_not_sharded
from composer.trainer.optimizers import needs_closure, wrapped_optimizers
from composer.trainer.options import (
    Arguments,
    check_duration,
    data_spec_of,
    described,
    microbatch_size,
)
from composer.trainer.precision import ClosureGradScaler
from composer.trainer.ranks import SingleProcess
from composer.utils import ensure_tuple, plain_int, plain_number


class RunSettings:
    """Checks settings and applies them to the state.

    Args:
        state: The run's state.
        model: The user's model, which provides the metrics.
        parallel: The ranks of the run.

    Attributes:
        train_spec: The training data; None: not given yet.
        step_every_batch: Step schedulers after every batch, otherwise after every epoch.
        given_schedulers: The user's schedulers.
    """

    def __init__(self, state: State, model: ComposerModel, parallel: SingleProcess) -> None:
        self.state, self.model, self.parallel = state, model, parallel
        self.train_spec: DataSpec | None = None
        self.train_label = "train"
        self.step_every_batch = True
        self.default_microbatch_size: float | None = None  # see `BatchTrainer`
        self._requested_size: Any = None  # the last `device_train_microbatch_size`
        # Schedulers that need the length of the run to be built, and their ratio.
        self._unbuilt: tuple[_Schedulers, float] | None = None
        self._unsized: Any = None  # the training loader that `_check_epochs` has already warned about
        self.given_schedulers: Sequence[Any] = ()

    @property
    def is_complete(self) -> bool:
        """True if the training data is given and all schedulers are built."""
        return self._unbuilt is None and self.train_spec is not None

    def set_train_data(self, arguments: Arguments) -> None:
        """Set the training data; without a loader, it is given later."""
        state, loader, label = self.state, arguments.train_dataloader, arguments.train_dataloader_label
        spec = self.train_spec = None if loader is None else data_spec_of("train_dataloader", loader)
        self.train_label = "train" if label is None else label
        self._set_microbatch_size(arguments.device_train_microbatch_size)
        if spec is not None:
            self.parallel.check_loader(spec.dataloader, "train_dataloader")
            pin_batches(spec.dataloader, state.device)
            _check_trainable(self.model)
            state.train_dataloader, state.train_data_spec = spec.dataloader, spec
            self._activate(spec.dataloader, _train_subset(arguments, -1))

    def replace_train_data(self, arguments: Arguments) -> None:
        """Apply the arguments of `fit` about training data; None leaves a setting unchanged.

        Raises:
            ValueError: There is no training data.
        """
        if arguments.train_dataloader is not None:
            self.set_train_data(arguments)
            return
        if self.train_spec is None:
            raise ValueError("No `train_dataloader` was given. Pass it to the `Trainer` or to `fit`.")
        if arguments.device_train_microbatch_size is not None:
            self._set_microbatch_size(arguments.device_train_microbatch_size)
        length = self.state._train_dataloader_len
        subset = _train_subset(arguments, -1 if length is None else length)
        if arguments.train_dataloader_label is not None:
            self.train_label = arguments.train_dataloader_label
        if arguments.train_dataloader_label is not None or arguments.train_subset_num_batches is not None:
            self._activate(self.train_spec.dataloader, subset)

    def _set_microbatch_size(self, requested: Any) -> None:
        state = self.state
        if requested == "auto":
            check_not_profiled(state.profiler, requested)
            check_not_sharded("device_train_microbatch_size", state)
        if requested is None:
            requested = self._requested_size
        self._requested_size = requested
        size, auto = _microbatch_size(requested, self.train_spec, state.device)
        if self.train_spec is not None:
            check_microbatch_size("device_train_microbatch_size", size, self.train_spec)
        state.device_train_microbatch_size, state.auto_microbatching = size, auto
        self.default_microbatch_size = size if requested is None else None

    def _activate(self, dataloader: Any, subset: int) -> None:
        """Make the training loader the active one, with a length that all ranks have."""
        state = self.state
        state.set_dataloader(dataloader, self.train_label, subset)
        local = None if state.dataloader_len is None else state.dataloader_len.value
        length = self.parallel.min_length(local)
        if length is not None and length != local:
            state.dataloader_len = length

    def set_evaluators(self, arguments: Arguments) -> None:
        """Set the evaluators; None is the default of an interval or number of batches."""
        evaluators = self.evaluators_of(arguments)
        for evaluator in evaluators:
            loader = evaluator.dataloader.dataloader
            if _is_iterator(loader):
                raise ValueError(
                    f"`eval_dataloader` must be a loader that can be iterated in every evaluation, got a "
                    f"{type(loader).__name__} for {evaluator.label!r}, which can be iterated only once. Pass a "
                    f"`DataLoader`, a list, or another iterable that can be iterated repeatedly."
                )
        self.state.evaluators = evaluators

    def replace_evaluation(self, arguments: Arguments) -> None:
        """Apply the arguments of `fit` about evaluation; None leaves a setting, or means the default for a new loader.

        Raises:
            ValueError: An interval or number of batches is given, but there are no evaluators.
        """
        if arguments.eval_dataloader is not None:
            self.set_evaluators(arguments)
            return
        interval, subset = arguments.eval_interval, arguments.eval_subset_num_batches
        given = {"eval_interval": interval, "eval_subset_num_batches": subset}
        names = [f"`{name}`" for name, value in given.items() if value is not None]
        if names and not self.state.evaluators:
            raise ValueError(
                f"{' and '.join(names)} must not be given without evaluators. Pass `eval_dataloader` to the "
                f"`Trainer` or to `fit`."
            )
        if subset is not None:
            subset = check_subset("eval_subset_num_batches", subset)
        values = {"eval_interval": interval, "subset_num_batches": subset}
        for evaluator in self.state.evaluators:
            evaluator._inherit(**{name: value for name, value in values.items() if value is not None})

    def evaluators_of(self, arguments: Arguments) -> list[Evaluator]:
        """Build evaluators, and add their metrics to the state."""
        evaluators = _build_evaluators(arguments)
        for evaluator in evaluators:
            self.parallel.check_loader(evaluator.dataloader.dataloader, "eval_dataloader")
            pin_batches(evaluator.dataloader.dataloader, self.state.device)
            if evaluator.subset_num_batches == -1:
                advice = "Pass the number of batches per evaluation: `eval_subset_num_batches=...`."
                check_ends("eval_dataloader", evaluator.dataloader.dataloader, advice)
        self._add_metrics(evaluators)
        return evaluators

    def _add_metrics(self, evaluators: Sequence[Evaluator]) -> None:
        for evaluator in evaluators:
            metrics = copy.deepcopy(self.model.get_metrics(is_train=False))
            self.parallel.prepare_metrics(metrics.values())
            self.state.eval_metrics[evaluator.label] = evaluator.select_metrics(metrics)

    def set_max_duration(self, max_duration: Any, ratio: float) -> None:
        """Set the length of the run, scaled by `ratio`; None: it is given later.

        Raises:
            ValueError: The duration is invalid, or `ratio` makes it zero.
        """
        if max_duration is not None:
            parsed = check_duration("max_duration", max_duration)
            self._check_iterations(parsed, "max_duration")
            self.state.max_duration = _scaled(parsed, ratio, "max_duration")
            self._check_epochs()

    def _check_iterations(self, duration: Time[Any], argument: str) -> None:
        if duration.unit is TimeUnit.ITERATION and self.state._iteration_length is None:
            raise ValueError(
                f"`{argument}` must not be in iterations, got {str(duration)!r}: it would "
                f"never end. Use for example '10ep' or '1000ba'."
            )

    def set_duration(self, duration: Any, ratio: float, begun: Timestamp | None = None) -> None:
        """Set the end of this call of `fit`: `duration` from its start, or `max_duration` if None.

        Args:
            duration: How much to train.
            ratio: Scales how much this call of `fit` trains.
            begun: The start of this call in the run that is resumed, which may have reached its end; None: it begins
                now.

        Raises:
            ValueError: No duration is given, it has been reached, or `ratio` makes it zero.
        """
        state = self.state
        start = state.timestamp if begun is None else begun
        if duration is not None:
            more = check_duration("duration", duration)
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

    def check_schedulers(self, arguments: Arguments) -> None:
        """Check the argument of `set_schedulers`.

        Raises:
            TypeError: An object is not a scheduler.
            ValueError: A scheduler belongs to another optimizer, or an argument has no effect without schedulers.
        """
        schedulers, ratio = arguments.schedulers, arguments.scale_schedule_ratio
        if isinstance(schedulers, Mapping) and not schedulers:
            raise TypeError("`schedulers` must be a scheduler, several, or schedulers by optimizer, got an empty dict.")
        given = _with_optimizers(schedulers)
        if not given:
            if ratio != 1.0:
                raise ValueError(f"`scale_schedule_ratio` must be 1.0 without `schedulers`, got {ratio!r}.")
            if arguments.step_schedulers_every_batch is not None:
                raise ValueError("`step_schedulers_every_batch` has no effect without `schedulers`. Leave it out.")
            return
        _check_schedulers(given, self.state.optimizers)

    def set_schedulers(self, arguments: Arguments) -> None:
        """Set the schedulers, scaled by the ratio; None leaves them unchanged."""
        given, every_batch = _with_optimizers(arguments.schedulers), arguments.step_schedulers_every_batch
        if not given:
            return
        self.given_schedulers = [scheduler for scheduler, _ in given]
        torch_schedulers = any(isinstance(scheduler, LRScheduler) for scheduler in self.given_schedulers)
        self.step_every_batch = not torch_schedulers if every_batch is None else every_batch
        self._unbuilt = (given, arguments.scale_schedule_ratio)
        if self.state.max_duration is not None and self.train_spec is not None:
            self.compile_schedulers()

    def compile_schedulers(self) -> None:
        """Build schedulers that could not be built before the length of the run and its data were known."""
        if self._unbuilt is not None:
            given, ratio = self._unbuilt
            self._unbuilt = None
            self.state.schedulers = _build_schedulers(given, self.state, ratio)
            self._check_lengths(scheduler for scheduler, _ in given if isinstance(scheduler, LRScheduler))

    def _check_lengths(self, schedulers: Iterable[LRScheduler]) -> None:
        """Warn about a torch scheduler whose length is in batches but which is stepped per epoch, or the reverse."""
        steps = self._steps_of_run()
        if steps is None:
            return
        unit, other = ("batch", "epoch") if self.step_every_batch else ("epoch", "batch")
        advice = (
            "Leave out `step_schedulers_every_batch`."
            if self.step_every_batch
            else ("Pass `step_schedulers_every_batch=True`.")
        )
        for scheduler in schedulers:
            name = next((name for name in ("total_steps", "T_max") if hasattr(scheduler, name)), None)
            if name is None:
                continue
            length = getattr(scheduler, name)
            given = f"`{type(scheduler).__name__}` has {name}={length}"
            stepped = f"but it is stepped once per {unit}, {steps[unit]} times"
            if length != steps[unit] and length == steps[other]:
                text = f"{given}, the number of {'epochs' if other == 'epoch' else 'batches'} of the run, {stepped}."
                warnings.warn(f"{text} {advice}", stacklevel=6)
            elif name == "total_steps" and length < steps[unit]:
                text = f"{given} and raises an error after that many steps, {stepped}."
                warnings.warn(f"{text} Pass {name}={steps[unit]}.", stacklevel=6)

    def _steps_of_run(self) -> dict[str, int] | None:
        """Return how many batches and epochs are left to train; None if unknown."""
        limit, per_epoch = self.state.max_duration, self.state.dataloader_len
        if limit is None or per_epoch is None or limit.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            return None
        left = (limit - self.state.timestamp.get(limit.unit)).value
        if limit.unit is TimeUnit.EPOCH:
            return {"epoch": left, "batch": left * per_epoch.value}
        return {"epoch": left // per_epoch.value, "batch": left}

    def set_scaler(self) -> None:
        """Create a gradient scaler for fp16; remove it for other precisions."""
        state = self.state
        self.parallel.check_precision(state.precision)
        state.scaler = None
        if state.precision is Precision.AMP_FP16:
            closure = any(needs_closure(optimizer) for optimizer in state.optimizers)
            kind = ClosureGradScaler if closure else torch.amp.GradScaler
            state.scaler = kind(state.device.torch_type)

    def _check_epochs(self) -> None:
        """Check that `max_duration` in epochs ends: a loader may yield only one epoch, or one that never ends.

        Raises:
            ValueError: The loader is an iterator, for several epochs, or is known to be endless.
        """
        state, limit = self.state, self.state.max_duration
        if limit is None or limit.unit is not TimeUnit.EPOCH or self.train_spec is None:
            return
        loader, epochs = self.train_spec.dataloader, limit.value - state.timestamp.epoch.value
        if epochs > 1 and _is_iterator(loader) and not is_endless(loader):
            raise ValueError(
                f"`train_dataloader` must be a loader that can be iterated {epochs} times for `max_duration` "
                f"{str(limit)!r}, got a {type(loader).__name__}, which can be iterated only once. Pass a `DataLoader`, "
                f"a list, or another iterable that can be iterated repeatedly."
            )
        if epochs > 0 and state.dataloader_limit is None and loader is not self._unsized:
            check_ends(
                "train_dataloader",
                loader,
                f"Because `max_duration` is {str(limit)!r}, pass `train_subset_num_batches=...`, the number of batches "
                f"per epoch, or a `max_duration` such as '1000ba'.",
            )
            self._unsized = loader


def _scaled(duration: Time[Any], ratio: float, argument: str) -> Time[Any]:
    """Scale a duration by `scale_schedule_ratio`."""
    scaled = duration if ratio == 1.0 else duration * float(ratio)
    if scaled.value <= 0:
        raise ValueError(
            f"`scale_schedule_ratio` {ratio!r} makes `{argument}` {str(duration)!r} zero. Use a larger one."
        )
    return scaled


def _check_trainable(model: torch.nn.Module) -> None:
    """Check that a model has trainable parameters, if it has any.

    Raises:
        ValueError: All parameters are frozen.
    """
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"`model` must have parameters that require gradients, got {user_model_name(model)}, all of whose "
            f"{len(parameters)} parameters are frozen: there is nothing to train. Call `requires_grad_(True)` on the "
            f"part to train, or leave `train_dataloader` out to evaluate only."
        )


def pin_batches(dataloader: Any, device: Device) -> None:
    """Let a loader with workers pin its batches if they go to a GPU: copies from pinned memory block nobody.

    Without workers, the main thread would pin them, which takes as long as the copy.
    """
    if device.name == "gpu" and isinstance(dataloader, torch.utils.data.DataLoader) and dataloader.num_workers:
        dataloader.pin_memory = True


def _is_iterator(dataloader: Any) -> bool:
    """Return True for generators and other iterators of Python, which can be iterated only once.

    Iterators of libraries can often be iterated repeatedly.
    """
    return isinstance(dataloader, Iterator) and type(dataloader).__module__ in ("builtins", "itertools")


def _build_evaluators(arguments: Arguments) -> list[Evaluator]:
    """Return the evaluators of `eval_dataloader`, each with an interval.

    Several loaders are labeled "eval", "eval_1", "eval_2" and so on, with a warning.

    Raises:
        ValueError: Evaluators are mixed with loaders, or two have the same label.
    """
    given = [] if arguments.eval_dataloader is None else _as_sequence(arguments.eval_dataloader)
    interval = 1 if arguments.eval_interval is None else arguments.eval_interval
    subset = -1 if arguments.eval_subset_num_batches is None else arguments.eval_subset_num_batches
    kinds = {isinstance(item, Evaluator) for item in given}
    if kinds == {True, False}:
        raise ValueError(
            "Mixing Evaluator with other classes is not allowed, please wrap every loader: "
            "`Evaluator(label=..., dataloader=...)`."
        )
    labels = ["eval" if i == 0 else f"eval_{i}" for i in range(len(given))]
    if len(given) > 1 and kinds == {False}:
        warnings.warn(
            f"The loaders of `eval_dataloader` are labeled {', '.join(map(repr, labels))}. Wrap each to choose its "
            f"label: `Evaluator(label=..., dataloader=...)`.",
            stacklevel=6,
        )
    evaluators = [
        item
        if isinstance(item, Evaluator)
        else Evaluator(label=label, dataloader=ensure_data_spec(item, "eval_dataloader"))
        for label, item in zip(labels, given, strict=True)
    ]
    labels = [evaluator.label for evaluator in evaluators]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"The labels of evaluators must differ, got {label!r} twice. Give each `Evaluator` another label."
            )
    for evaluator in evaluators:
        evaluator._inherit(eval_interval=interval, subset_num_batches=check_subset("eval_subset_num_batches", subset))
    return evaluators


def _microbatch_size(size: Any, spec: DataSpec | None, device: Device) -> tuple[float | None, bool]:
    """Return the samples per forward pass (None: the whole batch), and True if the size is searched for.

    Raises:
        ValueError: The size is not positive, or 'auto' is not supported here.
        TypeError: The size is not a number.
    """
    batch_size = None if spec is None else plain_number(getattr(spec.dataloader, "batch_size", None))
    if size is None:
        return batch_size, False
    if isinstance(size, str):
        _check_auto(size, spec, device)
        return batch_size, True
    return microbatch_size("device_train_microbatch_size", size), False


def _check_auto(size: str, spec: DataSpec | None, device: Device) -> None:
    if device.name != "gpu":
        raise ValueError("`device_train_microbatch_size='auto'` needs a GPU: it searches what fits its memory.")
    if spec is not None and getattr(spec.dataloader, "batch_size", None) is None:
        raise ValueError(
            "`device_train_microbatch_size='auto'` starts from the loader's `batch_size`, but `train_dataloader` has "
            "none. Give a number instead."
        )
    warnings.warn(
        "`device_train_microbatch_size='auto'` may potentially fail with unexpected CUDA errors. Give a "
        "number if it does.",
        stacklevel=5,
    )


_Schedulers = list[tuple[Any, torch.optim.Optimizer | None]]


def _with_optimizers(schedulers: Any) -> _Schedulers:
    """Return pairs of a scheduler and the optimizer that the user gives it to; None: all optimizers."""
    if isinstance(schedulers, Mapping):
        return [(each, optimizer) for optimizer, given in schedulers.items() for each in ensure_tuple(given)]
    return [(scheduler, None) for scheduler in ensure_tuple(schedulers)]


def _check_schedulers(schedulers: _Schedulers, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that objects are schedulers that this run can step.

    Args:
        schedulers: The user's schedulers, and the optimizers that they are given to.
        optimizers: The run's optimizers.

    Raises:
        TypeError: An object is neither a torch scheduler nor a function, or its `step` needs a metric.
        ValueError: A scheduler belongs to another optimizer.
    """
    known = wrapped_optimizers(optimizers)
    groups = {id(group) for optimizer in known for group in optimizer.param_groups}
    for scheduler, owner in schedulers:
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise TypeError(
                f"`schedulers` must be torch schedulers or functions `f(state, ssr)`, got {described(scheduler)}."
            )
        if owner is None:
            continue
        if not any(owner is optimizer for optimizer in known):
            raise ValueError(
                f"`schedulers` must have the run's optimizers as keys, got {described(owner)}. The run trains with "
                f"{', '.join(type(optimizer).__name__ for optimizer in known) or 'none'}."
            )
        if isinstance(scheduler, LRScheduler) and scheduler.optimizer.param_groups is not owner.param_groups:
            raise ValueError(
                f"`schedulers` must give a torch scheduler to the optimizer that it was made for, but a "
                f"{type(scheduler).__name__} of {type(scheduler.optimizer).__name__} is given to another "
                f"{type(owner).__name__}."
            )
    for scheduler in with_members(scheduler for scheduler, _ in schedulers):
        if not isinstance(scheduler, LRScheduler):
            continue
        kind = type(scheduler).__name__
        required = [p for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
        if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required):
            raise TypeError(
                f"`schedulers` must be schedulers whose `step` needs no argument, got {kind}, whose "
                f"`step({required[0].name})` needs one. Use a schedule of `composer.optim`, or step it yourself in "
                f"`eval_end` of a `Callback`, where `state.eval_metrics` has the metrics."
            )
        target = getattr(scheduler, "optimizer", None)
        if target is None or any(target is optimizer for optimizer in known):
            continue
        if not any(id(group) in groups for group in target.param_groups):
            given = ", ".join(type(optimizer).__name__ for optimizer in known) or "no optimizer"
            raise ValueError(
                f"`schedulers` must change the learning rate of the run's optimizer, but {kind} belongs to another "
                f"{type(target).__name__}; the run trains with {given}. Create the scheduler for the optimizer that "
                f"is passed as `optimizers`."
            )


def with_members(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Iterate over schedulers and the schedulers that they consist of, as in `SequentialLR`."""
    for scheduler in schedulers:
        yield scheduler
        yield from with_members(getattr(scheduler, "_schedulers", ()))


def _build_schedulers(schedulers: _Schedulers, state: State, ssr: float) -> list[LRScheduler]:
    """Return torch schedulers: those of `composer.optim` compiled, and all scaled by the schedule ratio.

    Raises:
        ValueError: There is no optimizer.
    """
    built: list[LRScheduler] = []
    for scheduler, owner in schedulers:
        if isinstance(scheduler, LRScheduler):
            scale_pytorch_scheduler(scheduler, ssr)
            built.append(scheduler)
        elif not state.optimizers:
            raise ValueError("`schedulers` need an optimizer, but the run has none. Pass `optimizers`.")
        else:
            for optimizer in state.optimizers if owner is None else [owner]:
                built.append(compile_composer_scheduler(scheduler, state, ssr, optimizer))
    return built


def _train_subset(arguments: Arguments, default: int) -> int:
    subset = arguments.train_subset_num_batches
    return check_subset("train_subset_num_batches", default if subset is None else subset)


def check_subset(argument: str, subset: Any) -> int:
    """Convert a number of batches; -1 is all.

    Raises:
        ValueError: It is not a positive integer or -1.
    """
    number = plain_int(subset)
    if number is None or number < -1 or number == 0:
        raise ValueError(f"`{argument}` must be a positive number of batches, or -1 for all, got {subset!r}.")
    return number


def _as_sequence(value: Any) -> list[Any]:
    # A loader may itself be a list of batches: only lists of loaders and evaluators are sequences here.
    if isinstance(value, (list, tuple)) and value and all(_is_data(item) for item in value):
        return list(value)
    return [value]


def _is_data(item: Any) -> bool:
    return isinstance(item, (Evaluator, DataSpec, torch.utils.data.DataLoader))
