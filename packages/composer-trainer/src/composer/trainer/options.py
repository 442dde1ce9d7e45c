"""The arguments of `Trainer` and `Trainer.fit`: the type and range of each, and which of them need others."""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex

import torch

from composer.checkpoint.names import (
    check_nonempty_path,
    check_pattern,
    check_relative,
    check_run_name,
)
from composer.checkpoint.storage import without_password
from composer.core import DataSpec, Event, Precision, State, Time, TimeUnit, ensure_data_spec, ensure_time
from composer.core.data_spec import length_of
from composer.distributed import DDPSyncStrategy
from composer.utils import check_flags, get_device, plain_int, plain_number
from composer.utils.interval_scheduler import check_interval_function
from composer.utils.parallelism import ParallelismConfig

_Given = ParamSpec("_Given")
TimeArgument = SupportsIndex | str | Time[Any]
OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[list[torch.nn.Parameter]], Any]
Interval = SupportsIndex | str | Time[Any] | Callable[[State, Event], bool]


class Arguments(SimpleNamespace):
    """The arguments of one call of `Trainer` or `Trainer.fit`, by the names that are in its signature."""

    _declared: dict[str, tuple[Any, Any]]  # each argument as it was given, and its default

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def replaced(self, **arguments: Any) -> Arguments:
        """Return a copy with other values for some arguments."""
        return Arguments(**{**vars(self), **arguments})

    def loggable(self) -> dict[str, Any]:
        """Return what `auto_log_hparams` logs: arguments as they were given, without defaults of `_OWN_ARGUMENTS`."""
        declared = self._declared.items()
        return {
            name: given for name, (given, default) in declared if name not in _OWN_ARGUMENTS or given is not default
        }

    def warn_without_effect(self, has_saver: bool) -> None:
        """Warn, once, of all arguments of `Trainer` that differ from their defaults and have no effect.

        Args:
            has_saver: True if the callbacks contain a `CheckpointSaver`, which has its own arguments.
        """
        ignored: dict[str, list[str]] = {}
        values = vars(self)
        for name, (given, default) in self._declared.items():
            value = plain_number(given)
            # Types are compared first: a `Time` in batches cannot be compared with "1ep". Zero switches something off.
            if (type(value) is type(default) and value == default) or (type(value) is int and value == 0):
                continue
            saves = name.startswith("save_") and name != "save_metrics"
            needs = _NEEDS.get(name, ())
            if name.startswith("load_") and name != "load_path":
                needs = ("load_path", "autoresume")
            elif saves and name != "save_folder":
                needs = ("save_folder",)
            if saves and has_saver:
                ignored.setdefault("with a `CheckpointSaver` in `callbacks`, whose arguments are used", []).append(name)
            elif needs and all(values[each] is None or values[each] is False for each in needs):
                ignored.setdefault("without " + " or ".join(f"`{each}`" for each in needs), []).append(name)
        if ignored:
            reasons = [f"{', '.join(f'`{name}`' for name in names)} {reason}" for reason, names in ignored.items()]
            warnings.warn(
                f"Arguments have no effect: {'; '.join(reasons)}. Leave them out, or add what they need.", stacklevel=4
            )


# Arguments of `Trainer` that have an effect only with one of others, which `fit` cannot give for them. All `load_...`
# and `save_...` need the checkpoint to load and the folder to save to.
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("train_dataloader_label", "train_subset_num_batches"), ("train_dataloader",)),
    **dict.fromkeys(("eval_interval", "eval_subset_num_batches"), ("eval_dataloader",)),
    **dict.fromkeys(("console_stream", "log_traces"), ("progress_bar", "log_to_console")),
    "console_log_interval": ("log_to_console",),
}

# MosaicML's Composer has no such arguments, and its users compare `local_hparams` with what they passed.
_OWN_ARGUMENTS = frozenset(
    "loss metrics input_key target_key compile_step branch_duration save_num_best_checkpoints_to_keep save_monitor "
    "save_monitor_mode save_async delivery_timeout".split()
)


def done_by(
    body: str, explain: Callable[[str, Collection[str]], str] | None = None
) -> Callable[[Callable[_Given, None]], Callable[_Given, None]]:
    """Let a method that is a signature and a docstring call the method `body` with its checked `Arguments`.

    So each argument is written in the signature and where it is used, and nowhere in between.

    Args:
        body: The name of the method to call.
        explain: Returns the message for a name that is not an argument, given those that are; None: Python's own.
    """

    def decorate(declared: Callable[_Given, None]) -> Callable[_Given, None]:
        parameters = inspect.signature(declared).parameters

        @wraps(declared)
        def method(*given: _Given.args, **named: _Given.kwargs) -> None:
            unknown = [name for name in named if name not in parameters]
            if unknown and explain is not None:
                raise TypeError(explain(unknown[0], parameters.keys()))
            declared(*given, **named)  # does nothing, but raises Python's own error for a wrong call
            getattr(given[0], body)(_check(named, parameters))

        return method

    return decorate


def _check(named: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> Arguments:
    """Check and convert the keyword arguments of a call; one error names all that are wrong.

    An argument that is annotated as `bool` must be one, and None is right where it is annotated or the default.

    Raises:
        TypeError: A value has the wrong type, or is a class where an object is needed.
        ValueError: A value is out of range.
    """
    declared = {name: (named.get(name, each.default), each.default) for name, each in parameters.items()}
    del declared["self"]
    values = {name: given for name, (given, _) in declared.items()}
    problems: list[TypeError | ValueError] = []
    for name, (value, default) in declared.items():
        annotation = str(parameters[name].annotation)
        check = _CHECKS.get(name, _flag if annotation.startswith("bool") else None)
        if check is None or value is default or (value is None and "None" in annotation):
            continue
        try:
            values[name] = check(name, value)
        except (TypeError, ValueError) as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = TypeError if all(isinstance(each, TypeError) for each in problems) else ValueError
        raise kind("\n".join(map(str, problems)))
    return Arguments(**values, _declared=declared)


def described(value: Any) -> str:
    """Describe a value of the wrong type for an error message."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`; pass `{value.__name__}(...)`"
    return type(value).__name__


# ---- several arguments ----


def weights_only(arguments: Arguments) -> bool:
    """Return True if only the model is loaded: a `.safetensors` file holds nothing else."""
    return arguments.load_weights_only or os.fspath(arguments.load_path or "").endswith(".safetensors")


def check_branch(arguments: Arguments) -> None:
    """Check the arguments of a branch of a run.

    Raises:
        ValueError: A run branches off nothing, or off weights alone, or has a length, too.
    """
    duration, path, max_duration = arguments.branch_duration, arguments.load_path, arguments.max_duration
    if duration is None:
        return
    if path is None:
        raise ValueError("`branch_duration` needs `load_path`, the checkpoint that the run branches off.")
    if weights_only(arguments):
        raise ValueError(
            f"`load_weights_only` must be False with `branch_duration`, and `load_path` not a `.safetensors` file, got "
            f"{arguments.load_weights_only!r} and {without_password(os.fspath(path))!r}: a branch continues the "
            f"optimizers and the data. Load a checkpoint of a run, or give `max_duration` to a new run."
        )
    if max_duration is not None:
        raise ValueError(
            f"`max_duration` must not be given with `branch_duration`, got {str(max_duration)!r} and "
            f"{str(duration)!r}: a branch ends that long after its checkpoint. Leave one out."
        )


# ---- single arguments: each function checks a value and returns it converted ----


def _flag(name: str, value: Any) -> bool:
    check_flags(**{name: value})
    return bool(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}.")
    if not value:
        raise ValueError(f"`{name}` must not be empty, got ''.")
    return value


def _run_name(name: str, value: Any) -> str:
    check_run_name(_text(name, value))
    return str(value)


def _log_level(name: str, value: Any) -> str:
    level = _text(name, value).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(f"`{name}` must be 'debug', 'info', 'warning', 'error' or 'critical', got {value!r}.")
    return level


def _load_path(name: str, value: Any) -> str:
    check_nonempty_path(name, value)
    return str(os.fspath(value))


def _folder(name: str, value: Any) -> str:
    check_nonempty_path(name, value)
    check_pattern(name, os.fspath(value), times=False)
    return str(os.fspath(value))


def _file_name(name: str, value: Any) -> str:
    check_nonempty_path(name, value)
    check_pattern(name, os.fspath(value))
    check_relative(name, os.fspath(value))
    return str(os.fspath(value))


def _keys(name: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        return value
    return _names(name, value, "patterns of paths such as ['state/optimizers/*'], or a function that removes keys")


def _names(name: str, value: Any, what: str = "class names such as ['BlurPool']") -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(item, str) for item in value):
        raise TypeError(f"`{name}` must be a list of {what}, got {value!r}.")
    return value


def _store(name: str, value: Any) -> Any:
    methods = ("download_object", "download_file")
    if isinstance(value, type) or not any(callable(getattr(value, method, None)) for method in methods):
        raise TypeError(
            f"`{name}` must be an object store or a logger that stores files, got {described(value)}. For a URI, leave "
            f"it out and pass `load_path='s3://...'`."
        )
    return value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict of arguments or None, got {value!r}.")
    return value


def _compile_config(name: str, value: Any) -> Mapping[str, Any]:
    known = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
    example = "Use `{}` for the defaults, or for example `{'mode': 'max-autotune'}`."
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict of arguments of `torch.compile` or None, got {value!r}. {example}")
    for key in value:
        if key not in known:
            raise ValueError(
                f"`{name}` must hold arguments of `torch.compile`, got {key!r}. It takes {', '.join(map(repr, known))}."
            )
    return value


def _sync_strategy(name: str, value: Any) -> DDPSyncStrategy:
    try:
        return value if isinstance(value, DDPSyncStrategy) else DDPSyncStrategy(str(value).lower())
    except ValueError:
        known = ", ".join(repr(member.value) for member in DDPSyncStrategy)
        raise ValueError(f"`{name}` must be {known} or None, got {value!r}.") from None


def parse_precision(name: str, value: Any) -> Precision:
    """Convert the name of a precision, also one that other trainers use.

    Raises:
        TypeError: The value is not a name.
        ValueError: There is no precision of that name.
    """
    allowed = ", ".join(repr(member.value) for member in Precision)
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.dtype, Precision)):
        raise TypeError(f"`{name}` must be one of {allowed}, got {value!r}.")
    try:
        return Precision(value)
    except (TypeError, ValueError) as error:
        _, found, hint = str(error).partition(" That is a dtype of weights.")
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}.{found}{hint}") from None


def _seed(name: str, value: Any) -> int:
    number = plain_int(value)
    if number is None:
        raise TypeError(f"`{name}` must be an integer, got {value!r}. Leave it out to draw one.")
    return number


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a positive number, got {value!r}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")
    return float(value)


def check_subset(name: str, value: Any) -> int:
    """Convert a number of batches; -1 is all.

    Raises:
        ValueError: The value is not a positive integer or -1.
    """
    number = plain_int(value)
    if number is None or number < -1 or number == 0:
        raise ValueError(f"`{name}` must be a positive number of batches, or -1 for all, got {value!r}.")
    return number


def _microbatch_size(name: str, value: Any) -> Any:
    number = plain_number(value)
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"`{name}` must be a number, 'auto' or None, got {value!r}.")
    if isinstance(number, bool) or not isinstance(number, (int, float, str)):
        raise TypeError(f"`{name}` must be a number, 'auto' or None, got {value!r}.")
    if not isinstance(number, str) and not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")
    return number


def _stream(name: str, value: Any) -> Any:
    is_text = isinstance(value, str) and value.lower() in ("stdout", "stderr")
    if not is_text and (isinstance(value, type) or not hasattr(value, "write")):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"`{name}` must be 'stdout', 'stderr' or a text stream, got {value!r}.")
    return value


def _time(name: str, value: Any) -> Time[Any]:
    plain = plain_number(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, str, Time)):
        raise TypeError(f"`{name}` must be a number of epochs, a time string or a `Time`, got {value!r}.")
    return ensure_time(plain, TimeUnit.EPOCH, argument=name)


def _duration(name: str, value: Any) -> Time[Any]:
    parsed = _time(name, value)
    if parsed.unit is TimeUnit.DURATION:
        raise ValueError(
            f"`{name}` must be in 'ep', 'ba', 'sp', 'tok' or 'sec', got {str(parsed)!r}. Use for example '10ep'."
        )
    if parsed.value <= 0:
        raise ValueError(f"`{name}` must be positive, got {str(parsed)!r}.")
    return parsed


def _console_interval(name: str, value: Any) -> Time[Any]:
    parsed = _time(name, value)
    if parsed.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or parsed.value <= 0:
        raise ValueError(
            f"`{name}` must be a positive number of epochs or batches, got {value!r}. Use for example '1ep' or '100ba'."
        )
    return parsed


def _interval(name: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        check_interval_function(name, value)
        return value
    parsed = _time(name, value)
    if name == "eval_interval" and parsed.value < 0:
        raise ValueError(
            f"`{name}` must be positive, or 0 to never evaluate during training, got {value!r}. Use for example '1ep'."
        )
    if name == "save_interval" and parsed.value <= 0:
        raise ValueError(
            f"`{name}` must be positive, got {value!r}. Leave `save_folder` out to save nothing, or use for example "
            f"'1ep'."
        )
    return parsed


def data_spec_of(name: str, value: Any) -> DataSpec:
    """Convert a dataloader to a `DataSpec`.

    Raises:
        TypeError: The value is not an iterable of batches, but for example a dataset, a string or a class.
        ValueError: The loader is empty.
    """
    spec = ensure_data_spec(value, name)
    if length_of(spec.dataloader) == 0:
        dataset = getattr(spec.dataloader, "dataset", None)
        samples = None if dataset is None else length_of(dataset)
        why = "" if not samples else f" Its dataset has {samples} samples: fewer than one batch, and `drop_last` is on."
        raise ValueError(f"`{name}` must not be empty, got a loader of 0 batches.{why}")
    return spec


# Arguments that are annotated as `bool` are checked without an entry here.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("train_dataloader_label", "save_monitor"), _text),
    **dict.fromkeys(("train_subset_num_batches", "eval_subset_num_batches"), check_subset),
    **dict.fromkeys(("branch_duration", "duration", "max_duration"), _duration),
    **dict.fromkeys(("eval_interval", "save_interval"), _interval),
    **dict.fromkeys(("save_filename", "save_latest_filename"), _file_name),
    **dict.fromkeys(("load_ignore_keys", "save_ignore_keys"), _keys),
    **dict.fromkeys(("scale_schedule_ratio", "delivery_timeout", "dist_timeout"), _positive),
    "train_dataloader": data_spec_of,
    "run_name": _run_name,
    "console_stream": _stream,
    "console_log_interval": _console_interval,
    "device": lambda _, value: get_device(value),
    "precision": parse_precision,
    "precision_config": _mapping,
    "device_train_microbatch_size": _microbatch_size,
    "seed": _seed,
    "ddp_sync_strategy": _sync_strategy,
    "parallelism_config": lambda _, value: ParallelismConfig.of(value),
    "python_log_level": _log_level,
    "compile_config": _compile_config,
    "load_path": _load_path,
    "load_object_store": _store,
    "load_exclude_algorithms": _names,
    "save_folder": _folder,
}
