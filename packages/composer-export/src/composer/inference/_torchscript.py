"""TorchScript, for as long as torch has it."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer.inference._call import Call
from composer.inference._outputs import plain_outputs, tensors_in

__all__ = ["first_line", "write_torchscript"]

log = logging.getLogger(__name__)


def write_torchscript(model: torch.nn.Module, call: Call | None, path: Path) -> None:
    """Compile a model, or else trace it, and write it. It is called as before.

    Args:
        model: The model.
        call: How it is called; None: it is not traced.
        path: The file.

    Raises:
        RuntimeError: It can neither be compiled nor traced.
    """
    log.warning("PyTorch has deprecated TorchScript. Consider `save_format='torch_export'`, or 'onnx'.")
    try:
        made = torch.jit.script(model)
    except Exception as error:
        if call is None:
            raise RuntimeError(
                f"The model cannot be compiled to TorchScript, and it cannot be traced without `sample_input`. Pass a "
                f"batch, or use `save_format='torch_export'`. The compiler says: {first_line(error)}"
            ) from error
        log.info("The model cannot be compiled to TorchScript, so it is traced. The compiler says: %s", error)
        try:
            made = _traced(model, call)
        except Exception as other:
            raise RuntimeError(
                f"The model can neither be compiled to TorchScript nor traced. Use `save_format='torch_export'`. The "
                f"compiler says: {first_line(error)} The tracer says: {first_line(other)}"
            ) from other
    torch.jit.save(made, str(path))


def _traced(model: torch.nn.Module, call: Call) -> Any:
    """The traced model, with a warning if it works for batches of the sample's size only, which the tracer hides."""
    try:
        traced = _traced_with(model, call.with_rows(2))
        reason = _difference(model, traced, call.with_rows(3))
        if not reason:
            return traced
    except Exception as error:  # noqa: BLE001 - the model may ask for a certain size
        reason = first_line(error)
    traced = _traced_with(model, call)
    warnings.warn(
        f"The traced model takes batches as large as the sample only, for tracing makes numbers of Python constant. "
        f"Use `save_format='torch_export'`. {reason}",
        stacklevel=8,
    )
    return traced


def _traced_with(model: torch.nn.Module, call: Call) -> Any:
    with warnings.catch_warnings():
        warning: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
        warnings.simplefilter("ignore", warning)  # what matters of it is looked for afterwards
        return torch.jit.trace(model, _arguments(model, call), strict=False)  # type: ignore[no-untyped-call]


def _arguments(model: torch.nn.Module, call: Call) -> tuple[Any, ...]:
    """What a traced model is called with: it has no keyword arguments, and takes dicts only."""
    args, kwargs = call.filled(call.tensors)
    if kwargs:
        args = inspect.signature(model.forward).bind(*args, **kwargs).args
    found: tuple[Any, ...] = _as_dicts(args)
    return found


def _difference(model: torch.nn.Module, traced: Any, call: Call) -> str:
    """How a traced model differs from the model, or nothing."""
    expected = tensors_in(plain_outputs(call.run(model)))
    with torch.no_grad():
        found = tensors_in(plain_outputs(traced(*_arguments(model, call))))
    alike = len(found) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )
    return "" if alike else "With another number of rows, its outputs are not those of the model."


def _as_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_dicts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_as_dicts(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty.

    Args:
        error: The error.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # torch writes in colours
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
