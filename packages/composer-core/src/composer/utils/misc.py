"""Helpers that fit nowhere else."""

from __future__ import annotations

import builtins
import math
import operator
import re
import socket
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from composer.utils._vision_transforms import add_vision_dataset_transform as add_vision_dataset_transform
from composer.utils.interval_scheduler import create_interval_scheduler as create_interval_scheduler
from composer.utils.string_enum import StringEnum

__all__ = [
    "STR_TO_DTYPE",
    "ParallelismType",
    "add_vision_dataset_transform",
    "check_finite",
    "check_flags",
    "check_integers",
    "create_interval_scheduler",
    "get_free_tcp_port",
    "is_model_ddp",
    "is_model_fsdp",
    "is_model_fsdp2",
    "is_notebook",
    "local_part",
    "model_eval_mode",
    "partial_format",
    "plain_int",
    "plain_number",
    "unwrapped_model",
    "warning_on_one_line",
]

STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

T = TypeVar("T")

_FIRST_NAME = re.compile(r"[^.\[]*")  # of a replacement field such as `run.name[0]`


class ParallelismType(StringEnum):
    """The names of the dimensions of a device mesh."""

    DATA_PARALLEL_SHARD = "data_parallel_shard"
    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    TENSOR_PARALLEL = "tensor_parallel"


def check_finite(**numbers: Any) -> None:
    """Check arguments of a constructor: numbers, or tensors of one number.

    Args:
        **numbers: Values by the name of the argument.

    Raises:
        TypeError: A value is no number; None, True and False are none.
        ValueError: A number is NaN or infinite.

    Example:
        >>> check_finite(lr=0.1, weight_decay=0)
        >>> check_finite(lr=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: `lr` must be finite, got nan. Check how it was computed.
    """
    for name, value in numbers.items():
        is_number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_number or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"`{name}` must be finite, got {value!r}. Check how it was computed.")


def check_integers(**numbers: Any) -> None:
    """Check arguments of a constructor that are whole numbers, of any library: `operator.index(value)` is the int.

    Args:
        **numbers: Values by the name of the argument.

    Raises:
        TypeError: A value is no integer; None, True, False and 2.0 are none.
        ValueError: A number is NaN or infinite.

    Example:
        >>> check_integers(depth=1.5)
        Traceback (most recent call last):
        ...
        TypeError: `depth` must be an integer, got 1.5.
    """
    for name, value in numbers.items():
        if plain_int(value) is None:
            check_finite(**{name: value})
            raise TypeError(f"`{name}` must be an integer, got {value!r}.")


def plain_int(value: object) -> int | None:
    """Return an integer of any library, such as NumPy's, as a plain int; None for anything else.

    Args:
        value: What has an `__index__` is an integer, but for True, False, tensors of booleans, and tensors on an
            accelerator, which the host would have to wait for. 2.0 is none.

    Example:
        >>> plain_int(np.int32(3)), plain_int(torch.tensor(3)), plain_int(True), plain_int(3.0)
        (3, 3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.dtype is torch.bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def plain_number(value: T) -> T:
    """Return a real number of any library as a plain int or float, and anything else, such as None, as it is.

    NumPy's numbers overflow, and not every program loads them: they stay out of what is computed, saved and logged.

    Args:
        value: A number; NumPy's booleans become plain ones, and tensors stay tensors but for those that `plain_int`
            takes.

    Example:
        >>> plain_number(np.float64(0.5)), plain_number(np.int64(2)), plain_number("1ep")
        (0.5, 2, '1ep')
    """
    if type(value) in (int, float, str):
        return value
    number: Any = plain_int(value)
    if number is None:
        number = value
        if isinstance(value, np.bool_):
            number = bool(value)
        elif isinstance(value, Real) and not isinstance(value, bool):
            number = float(value)
    return number  # type: ignore[no-any-return]


def check_flags(**flags: Any) -> None:
    """Check arguments of a constructor that are True or False: a text such as "no" would count as True.

    Args:
        **flags: Values by the name of the argument.

    Raises:
        TypeError: A value is neither True, False, 0 nor 1.

    Example:
        >>> check_flags(batch="no")
        Traceback (most recent call last):
        ...
        TypeError: `batch` must be True or False, got 'no'.
    """
    for name, value in flags.items():
        is_bit = isinstance(value, Integral) and value in (0, 1)
        if not (isinstance(value, (bool, np.bool_)) or is_bit):
            raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def is_model_ddp(model: torch.nn.Module) -> bool:
    """Whether the model is wrapped in `DistributedDataParallel`."""
    return isinstance(model, DistributedDataParallel)


def is_model_fsdp(model: torch.nn.Module) -> bool:
    """Whether the model or one of its direct children is sharded, by either version of FSDP."""
    return _is_sharded(model, "FullyShardedDataParallel", "FSDPModule")


def is_model_fsdp2(model: torch.nn.Module) -> bool:
    """Whether the model or one of its direct children is sharded by `fully_shard`."""
    return _is_sharded(model, "FSDPModule")


def _is_sharded(model: torch.nn.Module, *names: str) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # what was never imported has sharded nothing; importing it takes a while
        return False
    kinds = tuple(kind for name in names if (kind := getattr(fsdp, name, None)) is not None)
    return isinstance(model, kinds) or any(isinstance(child, kinds) for child in model.children())


def is_notebook() -> bool:
    """Whether this code runs in a Jupyter or Colab notebook."""
    get_ipython = getattr(builtins, "get_ipython", None)
    return get_ipython is not None and "IPKernelApp" in get_ipython().config


def warning_on_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> str:
    r"""A replacement for `warnings.formatwarning` that leaves out the source line.

    Example:
        >>> warning_on_one_line("Slow.", UserWarning, "train.py", 3)
        'UserWarning: Slow. (source: train.py:3)\n'
    """
    return f"{category.__name__}: {message} (source: {filename}:{lineno})\n"


def get_free_tcp_port() -> int:
    """A TCP port of this machine that nobody is using right now; somebody else may still take it first."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def model_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for the body; afterwards every submodule is in the mode it was in before."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def partial_format(s: str, *args: Any, **kwargs: Any) -> str:
    """Format a string as far as the arguments go; other replacement fields stay as they are.

    Args:
        s: A format string for `str.format`.
        *args: Values of numbered fields.
        **kwargs: Values of named fields.

    Example:
        >>> partial_format("ep{epoch:03d}-rank{rank}", rank=0)
        'ep{epoch:03d}-rank0'
    """
    formatter = string.Formatter()
    given = {*map(str, range(len(args))), *kwargs}
    result: list[str] = []
    next_index = 0
    for literal, field, spec, conversion in formatter.parse(s):
        result.append(literal)
        if field is None:
            continue
        path = field
        if _FIRST_NAME.match(field)[0] == "":  # type: ignore[index]  # the pattern matches everything
            path, next_index = f"{next_index}{field}", next_index + 1
        tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        needed = [path, *(inner for _, inner, _, _ in formatter.parse(spec or "") if inner is not None)]
        if all(_FIRST_NAME.match(name)[0] in given for name in needed):  # type: ignore[index]
            result.append(formatter.vformat("{" + path + tail + "}", args, kwargs))
        else:
            result.append("{" + field + tail + "}")
    return "".join(result)


def unwrapped_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside `DistributedDataParallel` and `torch.compile`, whose names have no prefix.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> unwrapped_model(torch.compile(layer)) is layer
        True
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), torch.nn.Module):
            model = inner
        else:
            return model


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor (`DTensor`); other tensors are whole and returned themselves."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
