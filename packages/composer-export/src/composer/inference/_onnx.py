"""ONNX, by torch's exporters."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer.inference._plan import Plan, explained

__all__ = ["exports_graphs", "write_onnx"]

_MOST_BYTES_IN_ONE_FILE = 2**31 - 2**20  # a protocol buffer holds less than 2 GiB; some room for the graph


def write_onnx(plan: Plan, path: Path, opset_version: int | None) -> None:
    """Write a model to a file of ONNX, and its weights to another one beside it if they are too large for one.

    Args:
        plan: What it takes and returns.
        path: The file.
        opset_version: The version of the operators; None is torch's choice.

    Raises:
        RuntimeError: Torch cannot export it.
    """
    program = plan.exported(flat=True)
    try:
        if exports_graphs():
            _write_graph(plan, program, path, opset_version)
        else:
            _write_trace(plan, program, path, opset_version)
    except OSError:
        raise
    except Exception as error:
        raise explained("onnx", error) from error


def exports_graphs() -> bool:
    """Whether this torch makes ONNX of the graph of `torch.export` by default; earlier releases did not all of it."""
    return bool(inspect.signature(torch.onnx.export).parameters["dynamo"].default)


def _write_graph(plan: Plan, program: torch.export.ExportedProgram, path: Path, opset_version: int | None) -> None:
    made: Any = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        input_names=list(plan.inputs),
        output_names=plan.outputs,
        opset_version=opset_version,
    )
    _rename_sizes(made.model.graph, _size_names(program, plan))
    weights = (*program.parameters(), *program.buffers())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    made.save(str(path), external_data=num_bytes > _MOST_BYTES_IN_ONE_FILE)


def _write_trace(plan: Plan, program: torch.export.ExportedProgram, path: Path, opset_version: int | None) -> None:
    names = _size_names(program, plan)
    shapes = _shapes(program)
    axes = {name: dict(plan.axes[name]) for name in plan.inputs}
    for output, node in zip(plan.outputs, program.graph_signature.user_outputs, strict=True):
        axes[output] = {i: names[str(size)] for i, size in enumerate(shapes[str(node)]) if str(size) in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph was made already: nothing is constant that should not be
        torch.onnx.export(
            plan.flat(),
            tuple(plan.sample(plan.axes).values()),
            str(path),
            dynamo=False,
            input_names=list(plan.inputs),
            output_names=plan.outputs,
            dynamic_axes=axes,
            opset_version=opset_version,
        )


def _shapes(program: torch.export.ExportedProgram) -> dict[str, Any]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return {name: value.shape for name, value in values.items() if isinstance(value, torch.Tensor)}


def _size_names(program: torch.export.ExportedProgram, plan: Plan) -> dict[str, str]:
    """The user's names of sizes, by torch's."""
    shapes, found = _shapes(program), {}
    for node, name in zip(program.graph_signature.user_inputs, plan.inputs, strict=True):
        for axis, size in plan.axes[name].items():
            found[str(shapes[str(node)][axis])] = size
    return found


def _rename_sizes(graph: Any, names: Mapping[str, str]) -> None:
    values = [*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)]
    for shape in {id(value.shape): value.shape for value in values if value.shape is not None}.values():
        for axis, size in enumerate(shape):
            if not isinstance(size, int) and size.value is not None:
                shape[axis] = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), size.value)
