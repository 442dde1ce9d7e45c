"""The formats that a model can be exported to: `torch.export`, ONNX and TorchScript."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from composer.inference.call import Call, DynamicAxes, OutputError, Signature, infer_signature
from composer.utils import StringEnum

log = logging.getLogger(__name__)

_MAX_BYTES_IN_ONE_FILE = 2**31 - 2**20  # a protocol buffer holds less than 2 GiB; some room for the graph
_DEPRECATIONS_IN_TORCH = r"(?s).*(`torch\.jit|torch\.jit\.|TorchScript|`isinstance\(treespec, LeafSpec\)`).*"


class ExportFormat(StringEnum):
    """A format to export a model to.

    Attributes:
        TORCH_EXPORT: `"torch_export"`: the graph that `torch.export` makes, read with `torch.export.load`; its files
            end in `.pt2`. PyTorch's own format, and the one to prefer.
        ONNX: `"onnx"`: the Open Neural Network Exchange format, for ONNX Runtime, TensorRT and others.
        TORCHSCRIPT: `"torchscript"`: read with `torch.jit.load`. PyTorch has deprecated it.
    """

    TORCH_EXPORT = "torch_export"
    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


def check_format(save_format: str | ExportFormat) -> ExportFormat:
    """Return the format of this name, if models can be exported to it here.

    Args:
        save_format: The format, or its name.

    Raises:
        ValueError: There is no such format.
        ModuleNotFoundError: The format needs packages that are not installed.
        RuntimeError: This release of torch no longer has the format.
    """
    checked = ExportFormat(save_format)
    if checked is ExportFormat.ONNX:
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(
                f"`save_format='onnx'` needs {' and '.join(f'`{name}`' for name in missing)}. Run "
                f"`pip install 'composer-export[onnx]'`.",
                name=missing[0],
            )
    if checked is ExportFormat.TORCHSCRIPT and not (hasattr(torch.jit, "script") and hasattr(torch.jit, "trace")):
        raise RuntimeError(
            f"`save_format='torchscript'` is not possible: torch {torch.__version__} no longer has TorchScript. Use "
            f"'torch_export'."
        )
    return checked


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
    """Write a model in evaluation mode on the CPU to a file, and large weights of ONNX to a second one beside it.

    The names and axes are those of `export_for_inference`. Only TorchScript works without a call.
    """
    unused: dict[str, Any] = {} if save_format is ExportFormat.ONNX else {"onnx_opset_version": opset_version}
    if save_format is ExportFormat.TORCHSCRIPT:
        unused |= {"dynamic_axes": dynamic_axes, "input_names": input_names, "output_names": output_names}
    for name, value in unused.items():
        if value is not None:
            warnings.warn(f"`{name}` has no effect for `save_format={save_format.value!r}`.", stacklevel=3)
    with _torch_settings():
        if save_format is ExportFormat.TORCHSCRIPT:
            _write_torchscript(model, call, path)
            return
        if call is None:
            raise ValueError(
                f"`sample_input` must be given for `save_format={save_format.value!r}`: a batch to call the model "
                f"with. `trainer.export_for_inference` takes the last batch of a run."
            )
        signature = infer_signature(call, dynamic_axes, input_names, output_names)
        program = _export_program(model, signature, save_format is ExportFormat.ONNX, dynamic_axes is None)
        signature.check_outputs(dynamic_axes)
        if save_format is ExportFormat.ONNX:
            _write_onnx(model, program, signature, path, opset_version)
        else:
            with path.open("wb") as file:
                torch.export.save(program, file)
    outputs = output_names or signature.outputs
    log.info("Exported as %r: the model takes %s and returns %s.", save_format.value, signature, outputs)


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Disable fused transformer layers, and the deprecation warnings that torch's exporters cause themselves."""
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # no other runtime has this operator
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", _DEPRECATIONS_IN_TORCH, category)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)


def _export_program(
    model: torch.nn.Module, signature: Signature, flat: bool, may_be_static: bool
) -> torch.export.ExportedProgram:
    """Return the graph for any sizes of the axes that vary, or else for the size of the sample, with a warning."""
    zeros, dynamic = signature.zeros(), torch.export.Dim.DYNAMIC
    by_name = signature.call.is_named and not flat
    try:
        return torch.export.export(
            signature.module(model, flat),
            () if by_name else tuple(zeros.values()),
            zeros if by_name else {},
            dynamic_shapes={name: dict.fromkeys(axes, dynamic) for name, axes in signature.axes.items()},
            strict=False,
        )
    except OutputError:
        raise
    except Exception as error:
        if not may_be_static or not any(signature.axes.values()):
            raise _export_error("torch_export", error, signature) from error
        reason = _first_line(error)
    signature.axes = {name: {} for name in signature.inputs}
    program = _export_program(model, signature, flat, may_be_static=False)
    warnings.warn(
        f"The exported model takes batches of the size of the sample only: {signature}. It cannot be exported for "
        f"batches of any size: {reason}",
        stacklevel=4,
    )
    return program


def _write_onnx(
    model: torch.nn.Module,
    program: torch.export.ExportedProgram,
    signature: Signature,
    path: Path,
    opset_version: int | None,
) -> None:
    options: dict[str, Any] = {
        "input_names": list(signature.inputs),
        "output_names": signature.output_names or signature.outputs,
        "opset_version": opset_version,
    }
    tensors = (*program.parameters(), *program.buffers())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    try:
        with warnings.catch_warnings():
            if _exports_graphs():
                warnings.filterwarnings("ignore", "# The axis name: ")  # inputs share the name of the batch's size
                axes = [dict(axes) for axes in signature.axes.values()]
                options |= {"external_data": num_bytes > _MAX_BYTES_IN_ONE_FILE, "dynamic_shapes": axes}
                torch.onnx.export(program, (), str(path), dynamo=True, verbose=False, **options)
            else:
                warnings.simplefilter("ignore")  # `torch.export` has shown that sizes are not constants
                flat, zeros = signature.module(model, flat=True), tuple(signature.zeros().values())
                axes_by_name = {name: dict(axes) for name, axes in signature.axes.items()}
                torch.onnx.export(flat, zeros, str(path), dynamo=False, dynamic_axes=axes_by_name, **options)
    except OSError:
        raise
    except Exception as error:
        raise _export_error("onnx", error, signature) from error


def _exports_graphs() -> bool:
    """Return True if this torch exports graphs of `torch.export` to ONNX by default, since 2.9, and not traces."""
    return bool(inspect.signature(torch.onnx.export).parameters["dynamo"].default)


def _write_torchscript(model: torch.nn.Module, call: Call | None, path: Path) -> None:
    """Compile a model, or else trace it, and write it. It is called as before the export."""
    log.warning("PyTorch has deprecated TorchScript. Consider `save_format='torch_export'`, or 'onnx'.")
    try:
        script = torch.jit.script(model)
    except Exception as error:
        if call is None:
            raise RuntimeError(
                f"The model cannot be compiled to TorchScript, and it cannot be traced without `sample_input`. Pass a "
                f"batch, or use `save_format='torch_export'`. The error of the compiler: {_first_line(error)}"
            ) from error
        log.info("The model cannot be compiled to TorchScript, so it is traced. The error of the compiler: %s", error)
        try:
            script = _trace(model, call)
        except Exception as trace_error:
            raise RuntimeError(
                f"The model can neither be compiled to TorchScript nor traced. Use `save_format='torch_export'`. The "
                f"error of the compiler: {_first_line(error)} The error of the tracer: {_first_line(trace_error)}"
            ) from trace_error
    torch.jit.save(script, str(path))


def _trace(model: torch.nn.Module, call: Call) -> Any:
    args, kwargs = call.arguments(call.tensors, plain=True)
    if kwargs:  # the tracer takes no keyword arguments
        args = inspect.signature(model.forward).bind(*args, **kwargs).args
    log.warning(
        "The model is traced, which turns Python numbers into constants: the file may take batches of the size of the "
        "sample only. Use `save_format='torch_export'` for others."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return torch.jit.trace(model, args, strict=False)  # type: ignore[no-untyped-call]


def _export_error(save_format: str, error: BaseException, signature: Signature) -> RuntimeError:
    """Return a short error in place of one of torch's exporters."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = _first_line(error) if cause is error else f"{_first_line(error)} ({_first_line(cause)})"
    hint = ""
    if "__obj_flatten__" in str(error):  # quantized weights
        hint = " Use `save_format='torchscript'`."
    elif len(signature.inputs) < len(signature.call.tensors):
        hint = (
            f" Its inputs are {', '.join(signature.inputs)}, without the rest of the sample, such as labels. If "
            f"the model needs more, pass the names of all its inputs as `input_names`."
        )
    return RuntimeError(f"The model cannot be exported as {save_format!r}: {type(error).__name__}: {text}{hint}")


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # colors of the terminal
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
