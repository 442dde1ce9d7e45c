"""Miscellaneous utilities."""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import platform
import re
import socket
import string
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core._registry import registered_names
from composer.utils.numbers import check_finite as check_finite
from composer.utils.numbers import check_flags as check_flags
from composer.utils.numbers import check_integers as check_integers
from composer.utils.numbers import int_at_least as int_at_least
from composer.utils.numbers import plain_int as plain_int
from composer.utils.numbers import plain_number as plain_number

F = TypeVar("F", bound=Callable[..., Any])

STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Data types of torch by their short names."""

_log = logging.getLogger(__name__)
_MAKES_TENSOR = {"ToTensor", "PILToTensor", "ToImage"}  # class names in torchvision.transforms and its v2
_FIRST_NAME = re.compile(r"[^.\[]*")  # matches `run` in a replacement field such as `run.name[0]`


def is_model_ddp(model: torch.nn.Module) -> bool:
    """Return True if the model is wrapped in `DistributedDataParallel`."""
    return isinstance(model, DistributedDataParallel)


def is_model_fsdp(model: torch.nn.Module) -> bool:
    """Return True if the model or one of its direct children is sharded by FSDP, version 1 or 2."""
    return _is_sharded(model, "FullyShardedDataParallel", "FSDPModule")


def is_model_fsdp2(model: torch.nn.Module) -> bool:
    """Return True if the model or one of its direct children is sharded by `fully_shard`."""
    return _is_sharded(model, "FSDPModule")


def _is_sharded(model: torch.nn.Module, *names: str) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported, so nothing is sharded; the import is slow
        return False
    kinds = tuple(kind for name in names if (kind := getattr(fsdp, name, None)) is not None)
    return isinstance(model, kinds) or any(isinstance(child, kinds) for child in model.children())


def is_notebook() -> bool:
    """Return True in a Jupyter or Colab notebook."""
    get_ipython = getattr(builtins, "get_ipython", None)
    return get_ipython is not None and "IPKernelApp" in get_ipython().config


def get_free_tcp_port() -> int:
    """Return a TCP port of this machine that is free at the moment. Another process may take it later."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def cpu_model() -> str:
    """Return the name of the processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as listing:  # Linux only
        for line in listing:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@contextmanager
def model_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for the body, then restore the mode of every submodule."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def partial_format(s: str, *args: Any, **kwargs: Any) -> str:
    """Format a string with some of its arguments; other replacement fields are unchanged.

    Args:
        s: A format string for `str.format`.
        *args: Values for numbered fields.
        **kwargs: Values for named fields.

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


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """Return a decorator that lets a function accept other names of its arguments, as keywords.

    Args:
        **names: The name of each argument by its other name.

    Raises:
        TypeError: When the function is called, if it gets an argument by both names.

    Example:
        >>> @renamed_arguments(colour="color")
        ... def paint(color):
        ...     return color
        >>> paint(colour="red")
        'red'
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"`{other}` and `{name}` are two names of the same argument, got both.")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        # A `MetricCollection` of torchmetrics passes the keywords that a signature has.
        signature = inspect.signature(function)
        others = [inspect.Parameter(other, inspect.Parameter.KEYWORD_ONLY, default=None) for other in names]
        known = [*signature.parameters.values()]
        more = [p for p in known if p.kind is inspect.Parameter.VAR_KEYWORD]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*(p for p in known if p not in more), *others, *more]
        )
        return call  # type: ignore[return-value]

    return decorate


def unwrapped_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers of `DistributedDataParallel` and `torch.compile`.

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
    """Return the local shard of a `DTensor`; return other tensors unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def add_vision_dataset_transform(
    dataset: Any, transform: Callable[[Any], Any], is_tensor_transform: bool = False
) -> None:
    """Add a transform to a torchvision dataset in place, and log a warning with the new transforms.

    The transform is inserted before the first `ToTensor` of a `Compose` (after it, with `is_tensor_transform`), or at
    the end if there is none. Any other existing transform becomes part of a `Compose` by the same rule.

    Args:
        dataset: A `torchvision.datasets.VisionDataset`.
        transform: The transform to add.
        is_tensor_transform: True if `transform` takes tensors instead of PIL images.

    Differs: an existing `Compose` is replaced, not changed, because other datasets may share it.
    """
    existing = dataset.transform
    if existing is None:
        dataset.transform = transform
    else:
        is_compose = _is_a(existing, {"Compose"})
        steps = list(existing.transforms) if is_compose else [existing]
        position = next((i for i, step in enumerate(steps) if _is_a(step, _MAKES_TENSOR)), len(steps))
        steps.insert(position + 1 if is_tensor_transform else position, transform)
        compose = type(existing) if is_compose else import_module("torchvision.transforms").Compose
        dataset.transform = compose(steps)
    # Some datasets read `transforms`, a `StandardTransform` with a copy of `transform`.
    joint = getattr(dataset, "transforms", None)
    if joint is not None and _is_a(joint, {"StandardTransform"}):
        dataset.transforms = type(joint)(dataset.transform, dataset.target_transform)
    elif joint is None and hasattr(dataset, "transforms"):
        standard = import_module("torchvision.datasets.vision").StandardTransform
        dataset.transforms = standard(dataset.transform, dataset.target_transform)
    _log.warning("Added %r to the transforms of %s: %r.", transform, type(dataset).__name__, dataset.transform)


def _is_a(transform: object, names: set[str]) -> bool:
    return any(base.__name__ in names for base in type(transform).__mro__)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer must run the forward and backward pass itself.

    It must if its `step` requires a closure (LBFGS), or if it declares `needs_closure = True` or
    `_step_supports_amp_closure = True`; the latter also promises to skip the step if the closure returns None. A `step`
    with an optional closure calls it first and once, which is the same as stepping after the pass, except that it does
    not handle None, the sign of an overflow in fp16. So it gets no closure.

    Args:
        optimizer: The optimizer as it is stepped, with all wrappers.
    """
    if getattr(optimizer, "_step_supports_amp_closure", False) or getattr(optimizer, "needs_closure", False):
        return True
    if getattr(optimizer, "single_pass", False):
        return False
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


__getattr__ = registered_names(__name__)
