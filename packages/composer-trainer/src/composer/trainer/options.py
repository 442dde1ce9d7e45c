"""Groups of the Trainer's arguments, and the checks that need only an argument's value: its type and range.

The fields have the names of the Trainer's arguments and are documented there. The defaults are in its signature only.
`DataOptions`, `EvaluationOptions` and `ScheduleOptions` are also the arguments of `fit`, where None leaves a setting
unchanged.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, SupportsIndex

import torch

from composer.checkpoint import IgnoreKeys
from composer.checkpoint.names import (
    check_characters,
    check_nonempty_path,
    check_pattern,
    check_relative,
    check_run_name,
)
from composer.checkpoint.storage import without_password
from composer.core import Algorithm, Callback, DataSpec, Event, State, Time, TimeUnit, ensure_data_spec, ensure_time
from composer.core.data_spec import length_of
from composer.distributed import DDPSyncStrategy
from composer.loggers import LoggerDestination
from composer.trainer.precision import parse_precision
from composer.utils import check_flags, get_device, plain_int, plain_number
from composer.utils.interval_scheduler import check_interval_function
from composer.utils.parallelism import ParallelismConfig

__all__ = [
    "DataOptions",
    "EvaluationOptions",
    "Interval",
    "LoadOptions",
    "LogOptions",
    "ModelOptions",
    "OptimizerArgument",
    "RunOptions",
    "SaveOptions",
    "ScheduleOptions",
    "TimeArgument",
    "check_arguments",
    "check_distinct",
    "check_duration",
    "data_spec_of",
    "described",
    "logged_arguments",
    "microbatch_size",
    "to_time",
    "warn_of_arguments_without_effect",
]

TimeArgument = SupportsIndex | str | Time[Any]
OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[list[torch.nn.Parameter]], Any]
Interval = SupportsIndex | str | Time[Any] | Callable[[State, Event], bool]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The loss and metrics of a model that has none of its own."""

    loss: Callable[..., Any] | None
    metrics: Any
    input_key: Any
    target_key: Any


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Name and seed of the run, ranks, optimizers and algorithms."""

    run_name: str | None
    seed: SupportsIndex | None
    deterministic_mode: bool
    precision_config: dict[str, Any] | None
    dist_timeout: float
    ddp_sync_strategy: str | DDPSyncStrategy | None
    parallelism_config: dict[str, Any] | ParallelismConfig | None
    algorithms: Algorithm | Sequence[Algorithm] | None
    optimizers: OptimizerArgument | None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The training data."""

    train_dataloader: Any
    train_dataloader_label: str | None
    train_subset_num_batches: SupportsIndex | None
    device_train_microbatch_size: SupportsIndex | float | str | None


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The evaluation data, and when it is used."""

    eval_dataloader: Any
    eval_interval: Interval | None
    eval_subset_num_batches: SupportsIndex | None


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The learning-rate schedulers, and the factor for them and for the length of the training."""

    schedulers: Any
    scale_schedule_ratio: float
    step_schedulers_every_batch: bool | None


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Callbacks, loggers and what the console shows."""

    callbacks: Callback | Sequence[Callback] | None
    loggers: LoggerDestination | Sequence[LoggerDestination] | None
    progress_bar: bool
    log_to_console: bool
    console_stream: Any
    console_log_interval: TimeArgument
    log_traces: bool


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The checkpoint that the run starts from."""

    load_path: str | os.PathLike[str] | None
    load_object_store: Any
    load_weights_only: bool
    load_strict_model_weights: bool
    load_progress_bar: bool
    load_ignore_keys: IgnoreKeys | None
    load_exclude_algorithms: Sequence[str] | None
    autoresume: bool
    branch_duration: TimeArgument | None

    @property
    def weights_only(self) -> bool:
        """True if only the model is loaded: a `.safetensors` file holds nothing else."""
        return self.load_weights_only or os.fspath(self.load_path or "").endswith(".safetensors")

    def check_branch(self) -> None:
        """Check the options of a branch.

        Raises:
            ValueError: A run branches off nothing, or off weights alone.
        """
        if self.branch_duration is not None and self.load_path is None:
            raise ValueError("`branch_duration` needs `load_path`, the checkpoint that the run branches off.")
        if self.branch_duration is not None and self.weights_only:
            raise ValueError(
                f"`load_weights_only` must be False with `branch_duration`, and `load_path` not a `.safetensors` file, "
                f"got {self.load_weights_only!r} and {without_password(os.fspath(self.load_path or ''))!r}: a branch "
                f"continues the optimizers and the data. Load a checkpoint of a run, or give `max_duration` to a new "
                f"run."
            )


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The checkpoints that the run saves."""

    save_folder: str | os.PathLike[str] | None
    save_filename: str
    save_latest_filename: str | None
    save_overwrite: bool
    save_interval: Interval
    save_weights_only: bool
    save_ignore_keys: IgnoreKeys | None
    save_num_checkpoints_to_keep: SupportsIndex
    save_metrics: bool
    save_num_best_checkpoints_to_keep: SupportsIndex
    save_monitor: str | None
    save_monitor_mode: str
    save_async: bool


_LOADING = (
    "load_object_store load_weights_only load_strict_model_weights load_progress_bar load_ignore_keys "
    "load_exclude_algorithms"
).split()
_SAVING = (
    "save_filename save_latest_filename save_overwrite save_interval save_weights_only save_ignore_keys "
    "save_num_checkpoints_to_keep save_num_best_checkpoints_to_keep save_monitor save_monitor_mode save_async"
).split()

# Arguments of `Trainer` that have an effect only with one of others, which `fit` cannot give for them.
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("train_dataloader_label", "train_subset_num_batches"), ("train_dataloader",)),
    **dict.fromkeys(("eval_interval", "eval_subset_num_batches"), ("eval_dataloader",)),
    **dict.fromkeys(("console_stream", "log_traces"), ("progress_bar", "log_to_console")),
    "console_log_interval": ("log_to_console",),
    **dict.fromkeys(_LOADING, ("load_path", "autoresume")),
    **dict.fromkeys(_SAVING, ("save_folder",)),
}


def warn_of_arguments_without_effect(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any], has_saver: bool
) -> None:
    """Warn, once, of all arguments of `Trainer` that differ from their defaults and have no effect.

    Args:
        arguments: All arguments by name.
        defaults: Their defaults.
        has_saver: True if the callbacks contain a `CheckpointSaver`, which has its own arguments.
    """
    ignored: dict[str, list[str]] = {}
    for name, default in defaults.items():
        value = plain_number(arguments[name])
        # Types are compared first: a `Time` in batches cannot be compared with "1ep". A zero switches something off.
        if (type(value) is type(default) and value == default) or (type(value) is int and value == 0):
            continue
        needs = _NEEDS.get(name, ())
        if has_saver and (name == "save_folder" or name in _SAVING):
            ignored.setdefault("with a `CheckpointSaver` in `callbacks`, whose arguments are used", []).append(name)
        elif needs and all(arguments[each] is None or arguments[each] is False for each in needs):
            ignored.setdefault("without " + " or ".join(f"`{each}`" for each in needs), []).append(name)
    if ignored:
        reasons = [f"{', '.join(f'`{name}`' for name in names)} {reason}" for reason, names in ignored.items()]
        warnings.warn(
            f"Arguments have no effect: {'; '.join(reasons)}. Leave them out, or add what they need.", stacklevel=3
        )


def check_arguments(**arguments: Any) -> None:
    """Check the types and ranges of arguments of `Trainer` or `Trainer.fit`; one error names all that are wrong.

    Args:
        **arguments: Values by the name of the argument; names without a check are ignored.

    Raises:
        TypeError: A value has the wrong type, or is a class where an object is needed.
        ValueError: A value is out of range.
    """
    problems: list[TypeError | ValueError] = []
    for name, value in arguments.items():
        check = _CHECKS.get(name)
        try:
            if check is not None:
                check(name, value)
        except (TypeError, ValueError) as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = TypeError if all(isinstance(each, TypeError) for each in problems) else ValueError
        raise kind("\n".join(map(str, problems)))


def described(value: Any) -> str:
    """Describe a value of the wrong type for an error message."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`; pass `{value.__name__}(...)`"
    return type(value).__name__


def check_distinct(argument: str, items: Sequence[Any]) -> None:
    """Check that no object is given twice: it would run twice. Two objects of one class are fine.

    Raises:
        ValueError: An object is given twice.
    """
    for index, item in enumerate(items):
        if any(item is other for other in items[:index]):
            raise ValueError(
                f"`{argument}` must contain every object once, got the same `{type(item).__name__}` object twice: it "
                f"would run twice at every event. Remove one, or create a second object."
            )


def _flag(name: str, value: Any) -> None:
    check_flags(**{name: value})


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}.")
    if not value:
        raise ValueError(f"`{name}` must not be empty, got ''.")


def _run_name(name: str, value: Any) -> None:
    _text(name, value)
    check_run_name(value)


def _load_path(name: str, value: Any) -> None:
    check_nonempty_path(name, value)
    check_characters(name, os.fspath(value))


def _folder(name: str, value: Any) -> None:
    check_nonempty_path(name, value)
    check_pattern(name, os.fspath(value), times=False)


def _file_name(name: str, value: Any) -> None:
    check_nonempty_path(name, value)
    check_pattern(name, os.fspath(value))
    check_relative(name, os.fspath(value))


def _mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict of arguments or None, got {value!r}.")


def _seed(name: str, value: Any) -> None:
    if plain_int(value) is None:
        raise TypeError(f"`{name}` must be an integer, got {value!r}. Leave it out to draw one.")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a positive number, got {value!r}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def _compile_config(name: str, value: Any) -> None:
    known = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
    example = "Use `{}` for the defaults, or for example `{'mode': 'max-autotune'}`."
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict of arguments of `torch.compile` or None, got {value!r}. {example}")
    for key in value:
        if key not in known:
            raise ValueError(
                f"`{name}` must hold arguments of `torch.compile`, got {key!r}. It takes {', '.join(map(repr, known))}."
            )


def _stream(name: str, value: Any) -> None:
    if isinstance(value, str):
        if value.lower() not in ("stdout", "stderr"):
            raise ValueError(f"`{name}` must be 'stdout', 'stderr' or a text stream, got {value!r}.")
    elif isinstance(value, type) or not hasattr(value, "write"):
        raise TypeError(f"`{name}` must be 'stdout', 'stderr' or a text stream, got {value!r}.")


def _console_interval(name: str, value: Any) -> None:
    parsed = to_time(name, value)
    if parsed.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or parsed.value <= 0:
        raise ValueError(
            f"`{name}` must be a positive number of epochs or batches, got {value!r}. Use for example '1ep' or '100ba'."
        )


def _interval(name: str, value: Any) -> None:
    if callable(value) and not isinstance(value, type):
        check_interval_function(name, value)
        return
    parsed = to_time(name, value)
    if name == "eval_interval" and parsed.value < 0:
        raise ValueError(
            f"`{name}` must be positive, or 0 to never evaluate during training, got {value!r}. Use for example '1ep'."
        )
    if name == "save_interval" and parsed.value <= 0:
        raise ValueError(
            f"`{name}` must be positive, got {value!r}. Leave `save_folder` out to save nothing, or use for example "
            f"'1ep'."
        )


def to_time(name: str, value: Any) -> Time[Any]:
    """Convert an argument to a `Time`.

    Raises:
        TypeError: It is not a number of epochs, a time string or a `Time`.
        ValueError: It cannot be parsed.
    """
    plain = plain_number(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, str, Time)):
        raise TypeError(f"`{name}` must be a number of epochs, a time string or a `Time`, got {value!r}.")
    return ensure_time(plain, TimeUnit.EPOCH, argument=name)


def check_duration(argument: str, duration: Any) -> Time[Any]:
    """Convert a duration to a `Time`.

    Raises:
        ValueError: It cannot be parsed, is not positive, or is a fraction of the run.
        TypeError: It is not a number of epochs, a time string or a `Time`.
    """
    parsed = to_time(argument, duration)
    if parsed.unit is TimeUnit.DURATION:
        raise ValueError(
            f"`{argument}` must be in 'ep', 'ba', 'sp', 'tok' or 'sec', got {str(parsed)!r}. Use for example '10ep'."
        )
    if parsed.value <= 0:
        raise ValueError(f"`{argument}` must be positive, got {str(parsed)!r}.")
    return parsed


def data_spec_of(argument: str, dataloader: Any) -> DataSpec:
    """Convert a dataloader argument to a `DataSpec`.

    Raises:
        TypeError: It is not an iterable of batches, but for example a dataset, a string or a class.
        ValueError: It is empty.
    """
    spec = ensure_data_spec(dataloader, argument)
    if length_of(spec.dataloader) == 0:
        dataset = getattr(spec.dataloader, "dataset", None)
        samples = None if dataset is None else length_of(dataset)
        why = "" if not samples else f" Its dataset has {samples} samples: fewer than one batch, and `drop_last` is on."
        raise ValueError(f"`{argument}` must not be empty, got a loader of 0 batches.{why}")
    return spec


def microbatch_size(name: str, size: Any) -> Any:
    """Convert a size of microbatches to a number of samples; 'auto' stays.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not positive, or a text other than 'auto'.
    """
    number = plain_number(size)
    if isinstance(size, str) and size != "auto":
        raise ValueError(f"`{name}` must be a number, 'auto' or None, got {size!r}.")
    if isinstance(number, bool) or not isinstance(number, (int, float, str)):
        raise TypeError(f"`{name}` must be a number, 'auto' or None, got {size!r}.")
    if not isinstance(number, str) and not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {size!r}.")
    return number


def _keys(name: str, value: Any) -> None:
    if callable(value) and not isinstance(value, type):
        return
    _names(name, value, "patterns of paths such as ['state/optimizers/*'], or a function that removes keys")


def _class_names(name: str, value: Any) -> None:
    _names(name, value, "class names such as ['BlurPool']")


def _names(name: str, value: Any, what: str) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(item, str) for item in value):
        raise TypeError(f"`{name}` must be a list of {what}, got {value!r}.")


def _store(name: str, value: Any) -> None:
    methods = ("download_object", "download_file")
    if isinstance(value, type) or not any(callable(getattr(value, method, None)) for method in methods):
        raise TypeError(
            f"`{name}` must be an object store or a logger that stores files, got {described(value)}. For a URI, leave "
            f"it out and pass `load_path='s3://...'`."
        )


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], None]:
    """Return a check that accepts None."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


# MosaicML's Composer has no such arguments, and its users compare `local_hparams` with what they passed.
_OWN_ARGUMENTS = frozenset(
    "loss metrics input_key target_key compile_step branch_duration save_num_best_checkpoints_to_keep save_monitor "
    "save_monitor_mode save_async delivery_timeout".split()
)


def logged_arguments(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer that `auto_log_hparams` logs: all but the defaults of this Trainer's own."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in _OWN_ARGUMENTS or value is not defaults.get(name)
    }


_FLAGS = (
    "progress_bar log_to_console log_traces auto_log_hparams accumulate_train_batch_on_tokens deterministic_mode "
    "load_weights_only load_strict_model_weights load_progress_bar save_overwrite save_weights_only save_metrics "
    "save_async autoresume reset_time"
).split()

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLAGS, _flag),
    "step_schedulers_every_batch": _optional(_flag),
    "spin_dataloaders": _flag,
    "train_dataloader_label": _text,
    "run_name": _optional(_run_name),
    "python_log_level": _optional(_text),
    "save_monitor": _optional(_text),
    "load_path": _optional(_load_path),
    "save_folder": _optional(_folder),
    "save_filename": _file_name,
    "save_latest_filename": _optional(_file_name),
    "save_interval": _interval,
    "eval_interval": _interval,
    "console_log_interval": _console_interval,
    "console_stream": _stream,
    "precision_config": _optional(_mapping),
    "compile_config": _optional(_compile_config),
    "compile_step": _flag,
    "seed": _optional(_seed),
    "scale_schedule_ratio": _positive,
    **dict.fromkeys(("branch_duration", "duration", "max_duration"), _optional(check_duration)),
    "device": lambda _, value: get_device(value),
    "precision": _optional(lambda _, value: parse_precision(value)),
    "train_dataloader": _optional(data_spec_of),
    "device_train_microbatch_size": _optional(microbatch_size),
    "delivery_timeout": _positive,
    "dist_timeout": _positive,
    "load_object_store": _optional(_store),
    "load_ignore_keys": _optional(_keys),
    "save_ignore_keys": _optional(_keys),
    "load_exclude_algorithms": _optional(_class_names),
}
