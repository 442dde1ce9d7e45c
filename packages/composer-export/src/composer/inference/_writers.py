"""Writing a model in each of the formats."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from composer.inference._call import Call
from composer.inference._formats import ExportFormat
from composer.inference._natural import DynamicAxes
from composer.inference._onnx import write_onnx
from composer.inference._plan import Plan
from composer.inference._torchscript import write_torchscript

__all__ = ["write"]

log = logging.getLogger(__name__)

_FROM_TORCH = r"(?s).*(`torch\.jit|torch\.jit\.|TorchScript|`isinstance\(treespec, LeafSpec\)`).*"


def write(
    save_format: ExportFormat,
    model: torch.nn.Module,
    call: Call | None,
    path: Path,
    dynamic_axes: DynamicAxes | None,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    opset_version: int | None,
) -> None:
    """Write a model to a file, and to others beside it if one cannot hold it.

    Args:
        save_format: The format.
        model: The model, in evaluation mode.
        call: How it is called; None only for TorchScript.
        path: The file.
        dynamic_axes: As in `export_for_inference`, like all others.
        input_names: The names of inputs.
        output_names: The names of outputs.
        opset_version: The version of ONNX's operators.
    """
    given = {"dynamic_axes": dynamic_axes, "input_names": input_names, "output_names": output_names}
    if save_format is ExportFormat.TORCHSCRIPT:
        _warn_of_unused({**given, "onnx_opset_version": opset_version}, save_format)
        with _quietly():
            write_torchscript(model, call, path)
        return
    if call is None:
        raise ValueError(
            f"`sample_input` must be given for `save_format={save_format.value!r}`: a batch to call the model with. Of "
            f"a run, `trainer.export_for_inference` takes the last one."
        )
    with _quietly():
        plan = Plan(model, call, dynamic_axes, input_names, output_names)
        if save_format is ExportFormat.ONNX:
            write_onnx(plan, path, opset_version)
        else:
            _warn_of_unused({"onnx_opset_version": opset_version}, save_format)
            _write_torch_export(plan, path)
    log.info("Exported as %r: the model takes %s and returns %s.", save_format.value, plan.inputs_text, plan.outputs)


def _write_torch_export(plan: Plan, path: Path) -> None:
    program = plan.exported(flat=False)
    with path.open("wb") as file:
        torch.export.save(program, file)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the deprecations that torch's exporters report of themselves, and without fused transformer layers."""
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # they are one operation that no other runtime has
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", _FROM_TORCH, category)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)


def _warn_of_unused(arguments: Mapping[str, Any], save_format: ExportFormat) -> None:
    for name, value in arguments.items():
        if value is not None:
            warnings.warn(f"`{name}` has no meaning for `save_format={save_format.value!r}`.", stacklevel=4)
