"""A model as one calls it to infer: with tensors as arguments, some of whose sizes vary."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from composer.inference._call import Call, Path
from composer.inference._outputs import plain_outputs, tensors_in

__all__ = ["DynamicAxes", "Inputs", "arranged_as", "axes_of", "names_of", "natural", "selected", "small_sample"]

DynamicAxes: TypeAlias = Mapping[str, Mapping[int, str] | Sequence[int]]
"""Axes whose sizes vary, by the name of the tensor: `{"image": {0: "batch"}}` or `{"image": [0]}`."""

Inputs: TypeAlias = dict[str, Path]
"""The tensors of a call by name."""

_BATCH = "batch"


def selected(call: Call, input_names: Sequence[str] | None) -> Call:
    """Of a call that is given tensors by name, those that `input_names` names, if it names such."""
    if input_names is None or not call.is_named or not set(input_names) <= {*_by_key(call)}:
        return call
    wanted = [_by_key(call)[name] for name in input_names]
    less = call.without([path for path in call.tensors if path not in wanted])
    return less.with_tensors({path: less.tensors[path] for path in wanted})


def names_of(call: Call, input_names: Sequence[str] | None) -> Inputs:
    """A name for each tensor.

    Args:
        call: The call, with the tensors that are inputs.
        input_names: What the user calls them; None: the keys of mappings, else "input", or "input_0" and so on.

    Raises:
        ValueError: There are more or fewer names than tensors, or a name is not possible.
    """
    by_key = _by_key(call)
    if input_names is None or set(input_names) <= by_key.keys():
        return {_identifier(name): path for name, path in by_key.items()}
    if len(input_names) != len(call.tensors) or len(set(input_names)) != len(input_names):
        raise ValueError(
            f"`input_names` must be one name for each input, of which the model has {len(call.tensors)} "
            f"({', '.join(by_key)}), got {list(input_names)!r}."
        )
    unusable = [name for name in input_names if _identifier(name) != name]
    if unusable:
        raise ValueError(f"`input_names` must be names as in Python, got {unusable[0]!r}.")
    return dict(zip(input_names, call.tensors, strict=True))


def _by_key(call: Call) -> dict[str, Path]:
    """The tensors by what they are called in the batch."""
    paths = list(call.tensors)
    if not call.is_named:
        return dict(
            zip(["input"] if len(paths) == 1 else [f"input_{i}" for i in range(len(paths))], paths, strict=True)
        )
    # The path begins with the position of the one batch, or with the name of an argument.
    return {"_".join(map(str, path[1:] if isinstance(path[0], int) else path)) or "input": path for path in paths}


def _identifier(name: str) -> str:
    found = re.sub(r"\W", "_", name)
    found = f"_{found}" if found[:1].isdigit() else found
    return f"{found}_" if keyword.iskeyword(found) else found


def natural(
    model: torch.nn.Module,
    call: Call,
    inputs: Inputs,
    arranged: Callable[[Any], Any] = lambda outputs: outputs,
) -> torch.nn.Module:
    """A module whose arguments are the tensors of a call, by these names.

    Args:
        model: The model.
        call: How it is called.
        inputs: The tensors.
        arranged: Changes the plain outputs.
    """

    class Natural(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(inputs, args, strict=False)), **kwargs}
            positional, named = call.filled({path: given[name] for name, path in inputs.items()})
            return arranged(plain_outputs(self.model(*positional, **named)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *inputs)]
    Natural.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # torch reads it
    return Natural().eval()


def axes_of(
    call: Call, inputs: Inputs, dynamic_axes: DynamicAxes | None, outputs: Sequence[str] = ()
) -> dict[str, dict[int, str]]:
    """The axes of each input whose size varies, with the name of the size.

    Args:
        call: The call.
        inputs: Its tensors.
        dynamic_axes: What the user says; None: the first of every tensor that has as many rows as the first tensor.
        outputs: The names of outputs, whose axes need not be said.

    Raises:
        ValueError: There is no such input or axis.
    """
    if dynamic_axes is None:
        has_rows = {name: call.tensors[path].shape[:1] == (call.num_rows,) for name, path in inputs.items()}
        return {name: {0: _BATCH} if has_rows[name] else {} for name in inputs}
    unknown = [name for name in dynamic_axes if name not in inputs and name not in outputs]
    if unknown:
        raise ValueError(
            f"`dynamic_axes` must have the names of inputs ({', '.join(inputs)}), got {unknown[0]!r}. Name the inputs "
            f"with `input_names` if you prefer others."
        )
    found: dict[str, dict[int, str]] = {}
    for name, path in inputs.items():
        said = dynamic_axes.get(name, {})
        axes = dict(said) if isinstance(said, Mapping) else {axis: f"{name}_axis_{axis}" for axis in said}
        dim = call.tensors[path].dim()
        if any(not -dim <= axis < dim for axis in axes):
            raise ValueError(f"`dynamic_axes` must have axes of {name!r}, which has {dim}, got {list(axes)}.")
        found[name] = {axis % dim: size for axis, size in axes.items()}
    return found


def small_sample(call: Call, inputs: Inputs, axes: Mapping[str, Mapping[int, str]]) -> Call:
    """The call with zeros, which files may hold, and with two rows, for torch takes a size of 1 for a constant."""
    of_rows = {size for name in axes for axis, size in axes[name].items() if axis == 0}
    of_rows -= {size for name in axes for axis, size in axes[name].items() if axis != 0}
    tensors = {}
    for name, path in inputs.items():
        shape = list(call.tensors[path].shape)
        for axis, size in axes[name].items():
            shape[axis] = 2 if size in of_rows else max(2, shape[axis])
        tensors[path] = torch.zeros(shape, dtype=call.tensors[path].dtype)
    return call.with_tensors(tensors)


def arranged_as(names: Sequence[str] | None) -> Callable[[Any], Any]:
    """Outputs by these names; None leaves them as they are."""
    if names is None:
        return lambda outputs: outputs
    return lambda outputs: dict(zip(names, tensors_in(outputs), strict=True))
