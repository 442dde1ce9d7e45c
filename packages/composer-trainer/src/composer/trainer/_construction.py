"""Builds the parts of a run from the Trainer's arguments, and answers bad ones."""

from __future__ import annotations

import inspect
import logging
import math
import os
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import (
    Callback,
    DataSpec,
    Evaluator,
    Precision,
    State,
    Time,
    TimeUnit,
    ensure_data_spec,
    ensure_time,
)
from composer.core.precision import validate_precision
from composer.devices import Device
from composer.loggers import LoggerDestination
from composer.loggers._text import open_stream
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.models import ComposerModel
from composer.optim import DecoupledSGDW, compile_composer_scheduler
from composer.trainer._arguments import as_precision, described
from composer.trainer._context import wrapped_optimizers
from composer.trainer._requested import with_members
from composer.trainer._scale_schedule import scale_pytorch_scheduler
from composer.utils import ensure_tuple, plain_int, plain_number

__all__ = [
    "build_evaluators",
    "build_loggers",
    "build_optimizer",
    "build_schedulers",
    "check_distinct",
    "check_duration",
    "check_model",
    "check_optimizers",
    "check_schedulers",
    "check_subset",
    "check_trainable",
    "data_spec_of",
    "generate_run_name",
    "is_used_up_by_iterating",
    "microbatch_size",
    "precision_of",
    "set_python_log_level",
]

log = logging.getLogger(__name__)

_ADJECTIVES = "amber bold brisk calm clever eager fair gentle keen lively lucid merry noble quiet swift vivid".split()
_NOUNS = "badger beaver cedar comet falcon fjord harbor heron lynx maple meadow otter raven sparrow willow wren".split()


def check_model(model: Any) -> tuple[ComposerModel, bool]:
    """The model itself, and whether it came wrapped by `torch.compile`.

    Raises:
        ValueError: It is not a `ComposerModel`.
    """
    original = getattr(model, "_orig_mod", None)
    compiled = original is not None
    if compiled:
        log.warning(
            "`model` is already compiled with `torch.compile`: it is unwrapped and compiled again when in place."
        )
        model = original
    if not isinstance(model, ComposerModel):
        raise ValueError(
            f"`model` must be a `ComposerModel`, got {described(model)}. Subclass `composer.ComposerModel`, or "
            f"wrap a classifier: `composer.models.ComposerClassifier(model, num_classes=...)`."
        )
    return model, compiled


def precision_of(precision: str | Precision | None, device: Device) -> Precision:
    """The numerical precision: what is asked for, else fp16 on a GPU and fp32 elsewhere.

    Raises:
        ValueError: It is unknown, or the device does not support it.
    """
    if precision is None:
        precision = Precision.AMP_FP16 if device.name == "gpu" else Precision.FP32
    precision = as_precision(precision)
    validate_precision(precision, device)
    return precision


def build_optimizer(model: ComposerModel, optimizers: Any) -> torch.optim.Optimizer | None:
    """The one optimizer of the run; without one, `DecoupledSGDW(lr=0.1)` with a warning.

    Raises:
        NotImplementedError: There is more than one.
        TypeError: It is no optimizer.
        ValueError: It holds no parameter of the model, or a setting that is no number; or nothing is in the list.
    """
    given = ensure_tuple(optimizers)
    if optimizers is not None and not given:
        raise ValueError(
            f"`optimizers` must be one `torch.optim.Optimizer`, got {optimizers!r}. Leave it out for "
            f"`DecoupledSGDW(lr=0.1)`."
        )
    if len(given) > 1:
        raise NotImplementedError(
            f"`optimizers` must be one optimizer, got {len(given)}. Put several into one `torch.optim.Optimizer` of "
            f"your own whose `step` steps them."
        )
    if given:
        if not isinstance(given[0], torch.optim.Optimizer):
            raise TypeError(f"`optimizers` must be a `torch.optim.Optimizer`, got {_described_optimizer(given[0])}.")
        _check_settings(given[0])
        check_optimizers(given, model)
        return given[0]
    parameters = list(model.parameters())
    if not parameters:
        warnings.warn(
            "No optimizer was specified, and the model does not have parameters. None is made; `fit` will need one.",
            stacklevel=3,
        )
        return None
    warnings.warn("No optimizer was specified. `DecoupledSGDW(lr=0.1)` is used.", stacklevel=3)
    return DecoupledSGDW(parameters, lr=0.1)


def _described_optimizer(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
        return f"the class `{value.__name__}`; pass `{value.__name__}(model.parameters(), lr=...)`"
    return described(value)


_FINITE = ("lr", "initial_lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho")


def _check_settings(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what would make all weights NaN with the first step."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key == "params":  # those of lazy modules have no shape yet
                continue
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if not (isinstance(number, float) or (isinstance(number, torch.Tensor) and number.numel() == 1)):
                    continue
                number = float(number)
                # Others may mean it: Prodigy's default growth rate is infinite.
                if math.isnan(number) or (math.isinf(number) and key in _FINITE):
                    raise ValueError(
                        f"`optimizers` must have finite settings, got {key}={value!r} in {type(optimizer).__name__}. "
                        f"Every weight would be NaN after the first step; give a finite `{key}`."
                    )
                if key == "lr" and number < 0:
                    raise ValueError(
                        f"`optimizers` must have learning rates that are not negative, got lr={value!r} in "
                        f"{type(optimizer).__name__}. Use `maximize=True` to maximize."
                    )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module, changed_by: str = "") -> None:
    """Refuse optimizers that train nothing of the model.

    Args:
        optimizers: The run's optimizers.
        model: The model that is trained.
        changed_by: What may have changed the model since it was given; "": nothing.

    Raises:
        ValueError: An optimizer holds no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: set[int] = set()
    foreign = 0
    for optimizer in optimizers:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kind, what = type(optimizer).__name__, type(model).__name__
        if own and own.isdisjoint(names):
            by = f"{changed_by} replaced them all" if changed_by else "it was built from another model, or from a copy"
            raise ValueError(
                f"`optimizers` must hold parameters of `model`, got {kind} with {len(own)} parameters, none of which "
                f"belongs to {what}: {by}. Nothing would be trained. Build it last: "
                f"`{kind}(model.parameters(), ...)`, with the very model that is passed to the `Trainer`."
            )
        held |= own
        foreign += len(own - names.keys())
    if foreign and not changed_by:
        missing = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in held]
        some = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
        told = f" No optimizer holds {len(missing)} parameters of the model, so they stay: {some}." if some else ""
        warnings.warn(
            f"`optimizers` hold {foreign} parameters that do not belong to `model`: they are neither moved to the "
            f"device nor saved.{told} Build the optimizer after the model is complete, and make a loss that has "
            f"parameters an attribute of the model.",
            stacklevel=4,
        )


def check_trainable(model: torch.nn.Module) -> None:
    """Refuse to train a model all of whose parameters are frozen.

    Raises:
        ValueError: None of its parameters requires a gradient.
    """
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"`model` must have parameters that require gradients, got {type(model).__name__}, all of whose "
            f"{len(parameters)} parameters are frozen: there is nothing to train. Call `requires_grad_(True)` on the "
            f"part to train, or leave `train_dataloader` out to evaluate only."
        )


def generate_run_name() -> str:
    """A name for the run: of the environment (COMPOSER_RUN_NAME, RUN_NAME), else the time and two words."""
    for variable in ("COMPOSER_RUN_NAME", "RUN_NAME"):
        if os.environ.get(variable):
            return os.environ[variable]
    chance = random.Random()  # of its own: the run's seed must not depend on whether a name was given
    return f"{int(time.time())}-{chance.choice(_ADJECTIVES)}-{chance.choice(_NOUNS)}"


def build_loggers(
    loggers: Any,
    callbacks: Any,
    *,
    progress_bar: bool,
    log_to_console: bool,
    console_stream: Any,
    console_log_interval: Any,
    log_traces: bool,
) -> tuple[list[LoggerDestination], list[Callback]]:
    """The loggers, with progress bar and console added unless they are among them, and the callbacks.

    Raises:
        TypeError: Something else is among them.
        ValueError: One object is among them twice.
    """
    destinations, others = list(ensure_tuple(loggers)), list(ensure_tuple(callbacks))
    for argument, items, kind in (("loggers", destinations, LoggerDestination), ("callbacks", others, Callback)):
        for item in items:
            if not isinstance(item, kind):
                raise TypeError(f"`{argument}` must hold `{kind.__name__}` objects, got {described(item)}.")
    check_distinct("loggers", destinations)
    check_distinct("callbacks", others)
    check_distinct("callbacks` and `loggers", [*destinations, *others])
    present = {type(destination) for destination in destinations}
    if progress_bar and log_to_console:
        warnings.warn(
            "`progress_bar` and `log_to_console` are both on and write over each other. Set one of them to False.",
            stacklevel=4,
        )
    for wanted, cls in ((progress_bar, ProgressBarLogger), (log_to_console, ConsoleLogger)):
        if wanted and cls in present:
            warnings.warn(
                f"`loggers` already holds a `{cls.__name__}`, which is used; the Trainer's argument has no effect.",
                stacklevel=4,
            )
    if progress_bar and ProgressBarLogger not in present:
        destinations.append(ProgressBarLogger(stream=console_stream, log_traces=log_traces))
    if log_to_console and ConsoleLogger not in present:
        destinations.append(
            ConsoleLogger(stream=console_stream, log_interval=console_log_interval, log_traces=log_traces)
        )
    return destinations, others


def check_distinct(argument: str, items: Sequence[Any]) -> None:
    """Refuse one object that is given twice: it would act twice. Two objects of one class are fine.

    Raises:
        ValueError: There is one.
    """
    for index, item in enumerate(items):
        if any(item is other for other in items[:index]):
            raise ValueError(
                f"`{argument}` must hold every object once, got the same `{type(item).__name__}` object twice: it "
                f"would act twice at every event. Leave one out, or make a second object."
            )


def data_spec_of(dataloader: Any, argument: str) -> DataSpec:
    """The data of an argument.

    Raises:
        TypeError: It yields no batches: a data set, a text, tensors, a class.
        ValueError: It is empty.
    """
    spec = ensure_data_spec(dataloader, argument)
    if _length(spec.dataloader) == 0:
        dataset = getattr(spec.dataloader, "dataset", None)
        samples = None if dataset is None else _length(dataset)
        why = (
            "" if not samples else f" Its data set has {samples} samples: fewer than one batch, and `drop_last` is on."
        )
        raise ValueError(f"`{argument}` must not be empty, got a loader of 0 batches.{why}")
    return spec


def is_used_up_by_iterating(dataloader: Any) -> bool:
    """Return whether a loader is a generator or another of Python's own iterators, which can be iterated only once.

    Iterators of libraries are not meant: they often begin anew.
    """
    return isinstance(dataloader, Iterator) and type(dataloader).__module__ in ("builtins", "itertools")


def build_evaluators(eval_dataloader: Any, eval_interval: Any, eval_subset_num_batches: Any) -> list[Evaluator]:
    """Return the evaluators of an argument, each with an interval.

    Several loaders that are not wrapped are labelled "eval", "eval_1", "eval_2" and so on, with a warning.

    Raises:
        ValueError: Evaluators are mixed with other things, two have one label, or a loader is empty.
    """
    given = [] if eval_dataloader is None else _as_sequence(eval_dataloader)
    kinds = {isinstance(item, Evaluator) for item in given}
    if kinds == {True, False}:
        raise ValueError(
            "Mixing Evaluator with other classes is not allowed, please wrap every loader: "
            "`Evaluator(label=..., dataloader=...)`."
        )
    if not given:
        if eval_interval not in (0, 1):
            warnings.warn("`eval_interval` has no effect without `eval_dataloader`.", stacklevel=5)
        if eval_subset_num_batches != -1:
            warnings.warn("`eval_subset_num_batches` has no effect without `eval_dataloader`.", stacklevel=5)
    labels = ["eval" if i == 0 else f"eval_{i}" for i in range(len(given))]
    if len(given) > 1 and kinds == {False}:
        warnings.warn(
            f"The loaders of `eval_dataloader` are labelled {', '.join(map(repr, labels))}. Wrap each to choose its "
            f"label: `Evaluator(label=..., dataloader=...)`.",
            stacklevel=5,
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
                f"The labels of evaluators must differ, got {label!r} twice. Give each `Evaluator` a label of its own."
            )
    for evaluator in evaluators:
        evaluator._inherit(
            eval_interval=eval_interval,
            subset_num_batches=check_subset("eval_subset_num_batches", eval_subset_num_batches),
        )
        data_spec_of(evaluator.dataloader, "eval_dataloader")
    return evaluators


def microbatch_size(size: Any, spec: DataSpec | None, device: Device) -> tuple[float | None, bool]:
    """Samples per forward pass (None: the whole batch), and whether the size is searched.

    Raises:
        ValueError: The size is not positive, or 'auto' is asked for where it cannot work.
        TypeError: The size is no number.
    """
    own = None if spec is None else plain_number(getattr(spec.dataloader, "batch_size", None))
    if size is None:
        return own, False
    if isinstance(size, str):
        _check_auto(size, spec, device)
        return own, True
    number = plain_number(size)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"`device_train_microbatch_size` must be a number, 'auto' or None, got {size!r}.")
    if not 0 < number < math.inf:
        raise ValueError(f"`device_train_microbatch_size` must be positive and finite, got {size!r}.")
    return number, False


def _check_auto(size: str, spec: DataSpec | None, device: Device) -> None:
    if size != "auto":
        raise ValueError(f"`device_train_microbatch_size` must be a number, 'auto' or None, got {size!r}.")
    if device.name != "gpu":
        raise ValueError("`device_train_microbatch_size='auto'` needs a GPU: it searches for what fits its memory.")
    if spec is not None and getattr(spec.dataloader, "batch_size", None) is None:
        raise ValueError(
            "`device_train_microbatch_size='auto'` starts from the loader's `batch_size`, but `train_dataloader` has "
            "none. Give a number instead."
        )
    warnings.warn(
        "`device_train_microbatch_size='auto'` may potentially fail with unexpected CUDA errors. Give a "
        "number if it does.",
        stacklevel=4,
    )


def check_duration(duration: Any, argument: str) -> Time[Any]:
    """A length of a run.

    Raises:
        ValueError: It does not parse, is not positive, or is a fraction of a run.
        TypeError: It is not a time at all, or a fraction of whole things.
    """
    plain = plain_number(duration)
    if not isinstance(plain, (int, str, Time)) or isinstance(plain, bool):
        raise TypeError(f"`{argument}` must be a number of epochs, a time string or a `Time`, got {duration!r}.")
    parsed = ensure_time(plain, TimeUnit.EPOCH, argument=argument)
    if parsed.unit is TimeUnit.DURATION:
        raise ValueError(
            f"`{argument}` must be in 'ep', 'ba', 'sp', 'tok' or 'sec', got {str(parsed)!r}. Use for example '10ep'."
        )
    if parsed.value <= 0:
        raise ValueError(f"`{argument}` must be positive, got {str(parsed)!r}.")
    return parsed


def check_schedulers(schedulers: Sequence[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse what is no scheduler, or cannot be stepped for this run.

    Args:
        schedulers: The user's schedulers.
        optimizers: The run's optimizers.

    Raises:
        TypeError: One is neither a torch scheduler nor a function, or a torch scheduler that is stepped with a metric.
        ValueError: One changes the learning rate of another optimizer.
    """
    own = wrapped_optimizers(optimizers)
    groups = {id(group) for optimizer in own for group in optimizer.param_groups}
    for scheduler in schedulers:
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise TypeError(
                f"`schedulers` must hold torch schedulers or functions `f(state, ssr)`, got {described(scheduler)}."
            )
    for scheduler in with_members(schedulers):
        if not isinstance(scheduler, LRScheduler):
            continue
        kind = type(scheduler).__name__
        required = [p for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
        if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required):
            raise TypeError(
                f"`schedulers` must hold schedulers whose `step` needs no argument, got {kind}, whose "
                f"`step({required[0].name})` needs one. Use a schedule of `composer.optim`, or step it yourself in "
                f"`eval_end` of a `Callback`, where `state.eval_metrics` has the metrics."
            )
        theirs = getattr(scheduler, "optimizer", None)
        if theirs is None or any(theirs is optimizer for optimizer in own):
            continue
        if not any(id(group) in groups for group in theirs.param_groups):
            given = type(own[0]).__name__ if own else "no optimizer"
            raise ValueError(
                f"`schedulers` must change the learning rate of the run's optimizer, but {kind} was made for another "
                f"{type(theirs).__name__}; the run trains with {given}. Make the scheduler from the very optimizer "
                f"that is passed as `optimizers`."
            )


def build_schedulers(schedulers: Sequence[Any], state: State, ssr: float) -> list[LRScheduler]:
    """Torch schedulers, those of this library compiled and all scaled by the schedule ratio.

    Raises:
        ValueError: There are schedulers but no optimizer.
    """
    built: list[LRScheduler] = []
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler):
            scale_pytorch_scheduler(scheduler, ssr)
            built.append(scheduler)
        elif state.optimizers:
            built.append(compile_composer_scheduler(scheduler, state, ssr))
        else:
            raise ValueError("`schedulers` need an optimizer, but the run has none. Pass `optimizers`.")
    return built


def check_subset(argument: str, subset: Any) -> int:
    """A number of batches, or -1 for all.

    Raises:
        ValueError: It is neither.
    """
    number = plain_int(subset)
    if number is None or number < -1 or number == 0:
        raise ValueError(f"`{argument}` must be a positive number of batches, or -1 for all, got {subset!r}.")
    return number


def set_python_log_level(level: str | None) -> None:
    """Show the library's log records, from `level` on, where `open_stream("stderr")` says."""
    if level is None:
        return
    if not isinstance(logging.getLevelName(level.upper()), int):
        raise ValueError(
            f"`python_log_level` must be 'debug', 'info', 'warning', 'error' or 'critical', got {level!r}."
        )
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        format=f"%(asctime)s: rank{rank}[%(process)d][%(threadName)s]: %(levelname)s: %(name)s: %(message)s",
        stream=open_stream("stderr"),
    )
    logging.getLogger("composer").setLevel(level.upper())


def _as_sequence(value: Any) -> list[Any]:
    # A loader may itself be a list of batches: only lists of loaders and evaluators are sequences here.
    if isinstance(value, (list, tuple)) and value and all(_is_data(item) for item in value):
        return list(value)
    return [value]


def _is_data(item: Any) -> bool:
    return isinstance(item, (Evaluator, DataSpec, torch.utils.data.DataLoader))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
