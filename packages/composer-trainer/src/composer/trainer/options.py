"""The arguments of `Trainer` and `Trainer.fit`, and the checks of a single value: its type and range."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex

import torch

from composer.checkpoint.names import (
    check_characters,
    check_nonempty_path,
    check_pattern,
    check_relative,
    check_run_name,
)
from composer.checkpoint.storage import without_password
from composer.core import DataSpec, Event, State, Time, TimeUnit, ensure_data_spec, ensure_time
from composer.core.data_spec import length_of
from composer.trainer.precision import parse_precision
from composer.utils import check_flags, get_device, plain_int, plain_number
from composer.utils.interval_scheduler import check_interval_function

_Given = ParamSpec("_Given")
TimeArgument = SupportsIndex | str | Time[Any]
OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[list[torch.nn.Parameter]], Any]
Interval = SupportsIndex | str | Time[Any] | Callable[[State, Event], bool]


class Arguments(SimpleNamespace):
    """The arguments of one call of `Trainer` or `Trainer.fit`, by the names that are in its signature."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def replaced(self, **arguments: Any) -> Arguments:
        """Return a copy with other values for some arguments."""
        return Arguments(**{**vars(self), **arguments})


def done_by(body: str) -> Callable[[Callable[_Given, None]], Callable[_Given, None]]:
    """Let a method that is a signature and a docstring call the method `body` with its `Arguments`.

    So each argument is written in the signature and where it is used, and nowhere in between.
    """

    def decorate(declared: Callable[_Given, None]) -> Callable[_Given, None]:
        signature = inspect.signature(declared)

        @wraps(declared)
        def method(*given: Any, **named: Any) -> None:
            declared(*given, **named)  # does nothing, but raises Python's own error for wrong arguments
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            trainer = bound.arguments.pop("self")
            getattr(trainer, body)(Arguments(**bound.arguments))

        method.__kwdefaults__ = declared.__kwdefaults__  # type: ignore[attr-defined]    # where defaults are looked up
        return method

    return decorate


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
            f"`max_duration` must not be given with `branch_duration`, got {max_duration!r} and {duration!r}: a branch "
            f"ends that long after its checkpoint. Leave one out."
        )


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


def warn_of_arguments_without_effect(arguments: Arguments, defaults: Mapping[str, Any], has_saver: bool) -> None:
    """Warn, once, of all arguments of `Trainer` that differ from their defaults and have no effect.

    Args:
        arguments: All arguments.
        defaults: Their defaults by name.
        has_saver: True if the callbacks contain a `CheckpointSaver`, which has its own arguments.
    """
    ignored: dict[str, list[str]] = {}
    given = vars(arguments)
    for name, default in defaults.items():
        value = plain_number(given[name])
        # Types are compared first: a `Time` in batches cannot be compared with "1ep". A zero switches something off.
        if (type(value) is type(default) and value == default) or (type(value) is int and value == 0):
            continue
        needs = _NEEDS.get(name, ())
        if has_saver and (name == "save_folder" or name in _SAVING):
            ignored.setdefault("with a `CheckpointSaver` in `callbacks`, whose arguments are used", []).append(name)
        elif needs and all(given[each] is None or given[each] is False for each in needs):
            ignored.setdefault("without " + " or ".join(f"`{each}`" for each in needs), []).append(name)
    if ignored:
        reasons = [f"{', '.join(f'`{name}`' for name in names)} {reason}" for reason, names in ignored.items()]
        warnings.warn(
            f"Arguments have no effect: {'; '.join(reasons)}. Leave them out, or add what they need.", stacklevel=4
        )


def check_arguments(arguments: Arguments, defaults: Mapping[str, Any]) -> None:
    """Check the types and ranges of arguments of `Trainer` or `Trainer.fit`; one error names all that are wrong.

    Args:
        arguments: The arguments; those without a check are ignored.
        defaults: Their defaults by name. None is right where it is the default.

    Raises:
        TypeError: A value has the wrong type, or is a class where an object is needed.
        ValueError: A value is out of range.
    """
    problems: list[TypeError | ValueError] = []
    for name, value in vars(arguments).items():
        check = _CHECKS.get(name)
        try:
            if check is not None and not (value is None and defaults.get(name, ...) is None):
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


def _optional_file_name(name: str, value: Any) -> None:
    if value is not None:
        _file_name(name, value)


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


# MosaicML's Composer has no such arguments, and its users compare `local_hparams` with what they passed.
_OWN_ARGUMENTS = frozenset(
    "loss metrics input_key target_key compile_step branch_duration save_num_best_checkpoints_to_keep save_monitor "
    "save_monitor_mode save_async delivery_timeout".split()
)


def logged_arguments(arguments: Arguments, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer that `auto_log_hparams` logs: all but the defaults of this Trainer's own."""
    return {
        name: value
        for name, value in vars(arguments).items()
        if name not in _OWN_ARGUMENTS or value is not defaults.get(name)
    }


_FLAGS = (
    "progress_bar log_to_console log_traces auto_log_hparams accumulate_train_batch_on_tokens deterministic_mode "
    "load_weights_only load_strict_model_weights load_progress_bar save_overwrite save_weights_only save_metrics "
    "save_async autoresume reset_time step_schedulers_every_batch spin_dataloaders compile_step"
).split()

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLAGS, _flag),
    "train_dataloader_label": _text,
    "run_name": _run_name,
    "python_log_level": _text,
    "save_monitor": _text,
    "load_path": _load_path,
    "save_folder": _folder,
    "save_filename": _file_name,
    "save_latest_filename": _optional_file_name,
    "save_interval": _interval,
    "eval_interval": _interval,
    "console_log_interval": _console_interval,
    "console_stream": _stream,
    "precision_config": _mapping,
    "compile_config": _compile_config,
    "seed": _seed,
    "scale_schedule_ratio": _positive,
    **dict.fromkeys(("branch_duration", "duration", "max_duration"), check_duration),
    "device": lambda _, value: get_device(value),
    "precision": lambda _, value: parse_precision(value),
    "train_dataloader": data_spec_of,
    "device_train_microbatch_size": microbatch_size,
    "delivery_timeout": _positive,
    "dist_timeout": _positive,
    "load_object_store": _store,
    "load_ignore_keys": _keys,
    "save_ignore_keys": _keys,
    "load_exclude_algorithms": _class_names,
}
