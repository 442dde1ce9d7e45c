"""The arguments of `Trainer` and `Trainer.fit`: what values each may have, and which of them need others.

The check of an argument stands in its type: an annotation of a signature that contains `Annotated[..., check]` has the
argument checked, and converted, by `check(name, value)`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from importlib.metadata import entry_points
from numbers import Real
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Protocol, SupportsIndex, TextIO, get_args

import torch

from composer.checkpoint import IgnoreKeys
from composer.checkpoint.names import (
    check_nonempty_path,
    check_pattern,
    check_relative,
    check_run_name,
)
from composer.core import (
    Algorithm,
    Callback,
    DataSpec,
    Event,
    Precision,
    State,
    Time,
    TimeUnit,
    ensure_data_spec,
    ensure_time,
)
from composer.core.data_spec import length_of
from composer.devices import Device
from composer.distributed import DDPSyncStrategy
from composer.loggers import LoggerDestination
from composer.loop.hosted_run import algorithms_in
from composer.trainer.strategy import Strategy
from composer.utils import check_flags, ensure_tuple, get_device, plain_int, plain_number
from composer.utils.iter_helpers import check_distinct
from composer.utils.parallelism import ParallelismConfig

_Given = ParamSpec("_Given")


class Arguments(SimpleNamespace):
    """The arguments of one call of `Trainer` or `Trainer.fit`, by the names that are in its signature."""

    _given: dict[str, Any]  # the keyword arguments of the call, before they were converted
    _defaults: dict[str, Any]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def loggable(self) -> dict[str, Any]:
        """Return what `auto_log_hparams` logs: the arguments as they were given, and the defaults of most others."""
        return {name: each for name, each in self._defaults.items() if name not in _OWN_ARGUMENTS} | self._given

    def warn_without_effect(self, has_saver: bool) -> None:
        """Warn, once, of all arguments of `Trainer` that differ from their defaults and have no effect.

        Args:
            has_saver: True if the callbacks contain a `CheckpointSaver`, which has its own arguments.
        """
        ignored: dict[str, list[str]] = {}
        for name, value in self._given.items():
            default = self._defaults.get(name)
            # Types are compared first: a `Time` in batches cannot be compared with "1ep". Zero switches something off.
            if (type(value) is type(default) and value == default) or (type(value) is int and value == 0):
                continue
            needs = next((needed for prefix, needed in _NEEDS.items() if name.startswith(prefix)), ())
            if name == "save_metrics":  # the metrics are in checkpoints that the program saves itself, too
                continue
            if has_saver and name.startswith("save_"):
                ignored.setdefault("with a `CheckpointSaver` in `callbacks`, whose arguments are used", []).append(name)
            elif needs and all(getattr(self, each) is None or getattr(self, each) is False for each in needs):
                ignored.setdefault("without " + " or ".join(f"`{each}`" for each in needs), []).append(name)
        if ignored:
            reasons = [f"{', '.join(f'`{name}`' for name in names)} {reason}" for reason, names in ignored.items()]
            warnings.warn(
                f"Arguments have no effect: {'; '.join(reasons)}. Leave them out, or add what they need.", stacklevel=6
            )


# Arguments whose names begin so have an effect only with one of the others.
_NEEDS: dict[str, tuple[str, ...]] = {
    "train_": ("train_dataloader",),
    "eval_": ("eval_dataloader",),
    "load_": ("load_path", "autoresume"),
    "save_": ("save_folder",),
    "console_log": ("log_to_console",),
    "console_": ("progress_bar", "log_to_console"),
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
        defaults = {name: each.default for name, each in parameters.items() if name != "self"}
        checks = {name: _check_of(hint) for name, hint in inspect.get_annotations(declared, eval_str=True).items()}

        @wraps(declared)
        def method(*given: _Given.args, **named: _Given.kwargs) -> None:
            unknown = sorted(named.keys() - parameters.keys())
            if unknown and explain is not None:
                raise TypeError(explain(unknown[0], parameters.keys()))
            declared(*given, **named)  # does nothing, but raises Python's own error for a wrong call
            arguments = Arguments(**{**defaults, **named}, _given=named, _defaults=defaults)
            problems: list[TypeError | ValueError] = []
            for name, value in named.items():
                check, may_be_none = checks[name]
                if check is None or value is defaults[name] or (value is None and may_be_none):
                    continue
                try:
                    setattr(arguments, name, check(name, value))
                except (TypeError, ValueError) as error:
                    problems.append(error)
            if len(problems) == 1:
                raise problems[0]
            if problems:
                kind = TypeError if all(isinstance(each, TypeError) for each in problems) else ValueError
                raise kind("\n".join(map(str, problems)))
            getattr(given[0], body)(arguments)

        return method

    return decorate


def _check_of(hint: Any) -> tuple[Callable[[str, Any], Any] | None, bool]:
    """Return the check in an annotation, and whether the argument may be None."""
    parts = (hint, *get_args(hint))
    checks = [part.__metadata__[0] for part in parts if hasattr(part, "__metadata__")]
    return (checks[0] if checks else _flag if bool in parts else None), NoneType in parts


def described(value: Any) -> str:
    """Describe a value of the wrong type for an error message."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`; pass `{value.__name__}(...)`"
    return type(value).__name__


# ---- each function checks a value and returns it converted ----


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


def _settings(name: str, value: Any) -> Mapping[str, Any]:
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


def _parallelism(name: str, value: Any) -> ParallelismConfig | Strategy | None:
    if isinstance(value, type) and issubclass(value, Strategy):
        raise TypeError(f"`{name}` must be an object, got the class {value.__name__}. Write `{value.__name__}()`.")
    if isinstance(value, Mapping) and len(value) == 1 and not value.keys() & {"fsdp", "fsdp2", "tp"}:
        ((kind, config),) = value.items()
        for point in entry_points(group="composer.strategies"):
            if point.name == kind:
                try:
                    strategy: Strategy = point.load()(config)
                except (OSError, TypeError, ValueError) as error:
                    raise ValueError(f"`{name}` is wrong. {error}") from error
                return strategy
        raise ValueError(
            f"`{name}` has the entries 'fsdp' and 'tp', or that of an installed strategy, got {kind!r}. Arguments of "
            f"sharding go inside: `{{'fsdp': {{'state_dict_type': 'sharded'}}}}`. A strategy may need its package: "
            f"`pip install composer-{kind}`."
        )
    return value if isinstance(value, Strategy) else ParallelismConfig.of(value)


def _precision(name: str, value: Any) -> Precision:
    """Convert the name of a precision, also one that other trainers use."""
    allowed = ", ".join(repr(member.value) for member in Precision)
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.dtype, Precision)):
        raise TypeError(f"`{name}` must be one of {allowed}, got {value!r}.")
    try:
        return Precision(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}.") from None


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


def _eval_interval(name: str, value: Any) -> Any:
    return _interval(name, value, "positive, or 0 to never evaluate during training", may_be_zero=True)


def _interval(name: str, value: Any, allowed: str = "positive", may_be_zero: bool = False) -> Any:
    if callable(value) and not isinstance(value, type):
        return value
    parsed = _time(name, value)
    if parsed.value < 0 or (parsed.value == 0 and not may_be_zero):
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}. Use for example '1ep'.")
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


def is_function(optimizers: Any) -> bool:
    """Return True if the argument `optimizers` is a function that makes them."""
    return callable(optimizers) and not isinstance(optimizers, (type, torch.optim.Optimizer))


def _optimizers(name: str, value: Any) -> Any:
    several = ensure_tuple(value)
    if not several:
        raise ValueError(
            f"`{name}` must be one or several `torch.optim.Optimizer`, got {value!r}. Leave it out for the default."
        )
    if is_function(value):
        return value
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            what = described(each)
            if isinstance(each, type) and issubclass(each, torch.optim.Optimizer):
                kind = each.__name__
                what = (
                    f"the class `{kind}`; pass `{kind}(model.parameters(), lr=...)`, or "
                    f"`functools.partial({kind}, lr=...)`"
                )
            raise TypeError(f"`{name}` must be a `torch.optim.Optimizer`, got {what}.")
    return value


def _callbacks(name: str, value: Any, kind: type = Callback) -> Any:
    several = ensure_tuple(value)
    for each in several:
        if not isinstance(each, kind):
            kinds = {"algorithms": Algorithm, "callbacks": Callback}
            hint = "".join(f" Pass it in `{other}`." for other, right in kinds.items() if isinstance(each, right))
            raise TypeError(f"`{name}` must hold `{kind.__name__}` objects, got {described(each)}.{hint}")
    check_distinct(name, several)
    return several


class TrainerProfiler(Protocol):
    """The interface of the Trainer's `profiler`; `composer.profiler.Profiler` implements it."""

    @property
    def remote_filenames(self) -> Sequence[str]:
        """The URIs of files that it uploads."""

    def bind_to_state(self, state: State) -> None:
        """Add the profiler to the callbacks of the run."""


def _profiler(name: str, value: Any) -> Any:
    if isinstance(value, type) or not hasattr(value, "bind_to_state"):
        raise TypeError(f"`{name}` must be a `composer.profiler.Profiler`, got {value!r}. Pass `Profiler(...)`.")
    return value


# ---- the types of arguments, each with its check; `bool` is checked without one ----

Loader = Any  # an iterable of batches, a DataSpec, or a dict of its arguments
TrainLoader = Annotated[Loader, data_spec_of]
Subset = Annotated[SupportsIndex, check_subset]
Algorithms = Annotated[Algorithm | Sequence[Algorithm], lambda _, value: algorithms_in(value)]
Callbacks = Annotated[Callback | Sequence[Callback], _callbacks]
Loggers = Annotated[
    LoggerDestination | Sequence[LoggerDestination], lambda name, value: _callbacks(name, value, LoggerDestination)
]
Optimizers = Annotated[
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[list[torch.nn.Parameter]], Any], _optimizers
]
Duration = Annotated[SupportsIndex | str | Time[Any], _duration]
ConsoleInterval = Annotated[SupportsIndex | str | Time[Any], _console_interval]
EvalInterval = Annotated[SupportsIndex | str | Time[Any] | Callable[[State, Event], bool], _eval_interval]
SaveInterval = Annotated[SupportsIndex | str | Time[Any] | Callable[[State, Event], bool], _interval]
Positive = Annotated[float, _positive]
Text = Annotated[str, _text]
RunName = Annotated[str, _run_name]
LogLevel = Annotated[str, _log_level]
Stream = Annotated[str | TextIO, _stream]
RunDevice = Annotated[str | torch.device | Device, lambda _, value: get_device(value)]
RunPrecision = Annotated[str | int | torch.dtype | Precision, _precision]
Settings = Annotated[dict[str, Any], _settings]
CompileConfig = Annotated[dict[str, Any], _compile_config]
DeepSpeedConfig = Annotated[dict[str, Any] | str, lambda name, value: _parallelism(name, {"deepspeed": value})]
Parallelism = Annotated[dict[str, Any] | ParallelismConfig | Strategy, _parallelism]
SyncStrategy = Annotated[str | DDPSyncStrategy, _sync_strategy]
MicrobatchSize = Annotated[SupportsIndex | float | str, _microbatch_size]
Seed = Annotated[SupportsIndex, _seed]
Profiler = Annotated[TrainerProfiler, _profiler]
LoadPath = Annotated[str | os.PathLike[str], _load_path]
ObjectStore = Annotated[Any, _store]
Keys = Annotated[IgnoreKeys, _keys]
ClassNames = Annotated[Sequence[str], _names]
Folder = Annotated[str | os.PathLike[str], _folder]
FileName = Annotated[str, _file_name]
