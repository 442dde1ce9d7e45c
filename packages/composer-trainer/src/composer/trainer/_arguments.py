"""Checks of the Trainer's arguments that need nothing but the value itself: its type and its range."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from composer.checkpoint.names import check_characters, check_pattern, check_relative, check_run_name
from composer.core import Precision, Time, TimeUnit, ensure_time
from composer.utils import check_flags, plain_int, plain_number
from composer.utils._interval_scheduler import check_interval_function

__all__ = ["as_precision", "check_arguments", "described"]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse values that an argument of `Trainer` or of `Trainer.fit` can never have.

    Args:
        arguments: Values by the name of the argument; names without a check are left alone.

    Raises:
        TypeError: A value has the wrong type, or is a class where an object is needed.
        ValueError: A value has the right type but cannot work.
    """
    for name, value in arguments.items():
        check = _CHECKS.get(name)
        if check is not None:
            check(name, value)


def described(value: Any) -> str:
    """What was given instead of an object, for a message; a class is told apart from its objects."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`; pass `{value.__name__}(...)`"
    return type(value).__name__


def as_precision(precision: str | Precision) -> Precision:
    """Return the `Precision` of a name.

    Raises:
        ValueError: There is none of that name.
        TypeError: It is no name.
    """
    allowed = ", ".join(repr(member.value) for member in Precision)
    if not isinstance(precision, (str, Precision)):
        raise TypeError(f"`precision` must be one of {allowed}, got {precision!r}.")
    try:
        return Precision(precision)
    except ValueError:
        meant = f"amp_{precision}".lower()
        hint = f" Did you mean {meant!r}?" if meant in allowed else ""
        raise ValueError(f"`precision` must be one of {allowed}, got {precision!r}.{hint}") from None


def _flag(name: str, value: Any) -> None:
    check_flags(**{name: value})


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}.")
    if not value:
        raise ValueError(f"`{name}` must not be empty, got ''.")


def _path(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path or a string, got {value!r}.")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must not be empty, got {value!r}.")


def _run_name(name: str, value: Any) -> None:
    _text(name, value)
    check_run_name(value)


def _load_path(name: str, value: Any) -> None:
    _path(name, value)
    check_characters(name, os.fspath(value))


def _folder(name: str, value: Any) -> None:
    _path(name, value)
    check_pattern(name, os.fspath(value), times=False)


def _file_name(name: str, value: Any) -> None:
    _path(name, value)
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
    parsed = _time(name, value)
    if parsed.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or parsed.value <= 0:
        raise ValueError(
            f"`{name}` must be a positive number of epochs or batches, got {value!r}. Use for example '1ep' or '100ba'."
        )


def _interval(name: str, value: Any) -> None:
    if callable(value) and not isinstance(value, type):
        check_interval_function(name, value)
        return
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


def _time(name: str, value: Any) -> Time[Any]:
    plain = plain_number(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, str, Time)):
        raise TypeError(f"`{name}` must be a time such as '1ep' or '100ba', or a number of epochs, got {value!r}.")
    return ensure_time(plain, TimeUnit.EPOCH, argument=name)


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


def _optional(check: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """A check that lets None pass."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


_FLAGS = (
    "progress_bar log_to_console log_traces auto_log_hparams accumulate_train_batch_on_tokens deterministic_mode "
    "load_weights_only load_strict_model_weights load_progress_bar save_overwrite save_weights_only save_metrics "
    "save_async autoresume reset_time"
).split()

_CHECKS: dict[str, Callable[[str, Any], None]] = {
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
    "seed": _optional(_seed),
    "scale_schedule_ratio": _positive,
    "delivery_timeout": _positive,
    "load_ignore_keys": _optional(_keys),
    "save_ignore_keys": _optional(_keys),
    "load_exclude_algorithms": _optional(_class_names),
}
