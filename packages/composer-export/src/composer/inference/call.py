"""Convert a sample batch to the named tensors that an exported model takes and returns."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from composer.models import ComposerModel

DynamicAxes: TypeAlias = Mapping[str, Mapping[int, str] | Sequence[int]]
"""Axes whose sizes vary, by the name of the tensor: `{"image": {0: "batch"}}` or `{"image": [0]}`."""

TensorPath: TypeAlias = tuple[Any, ...]
"""The keys and positions that lead to a tensor in nested containers."""


class OutputError(TypeError):
    """A model returns something other than tensors."""


@dataclass(frozen=True)
class Call:
    """Arguments to call a model with.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        tensors: Detached copies on the CPU of their tensors, by path: the position or name of the argument comes first.
        takes_batch: True for a `ComposerModel`: its one argument is a batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[TensorPath, torch.Tensor]
    takes_batch: bool

    @property
    def is_named(self) -> bool:
        """True if tensors are passed by name: in one mapping, or as keyword arguments."""
        return bool(self.kwargs) or (len(self.args) == 1 and isinstance(self.args[0], Mapping))

    @property
    def num_rows(self) -> int:
        """The size of the batch: the first dimension of the first tensor that has one, or 0."""
        return next((tensor.shape[0] for tensor in self.tensors.values() if tensor.dim()), 0)

    def has_rows(self, path: TensorPath) -> bool:
        """Return True if the first dimension of this tensor is the batch."""
        return self.num_rows > 0 and self.tensors[path].shape[:1] == (self.num_rows,)

    def arguments(self, tensors: Mapping[TensorPath, Any], plain: bool = False) -> Any:
        """Return `(args, kwargs)` with these tensors, and None or no entry of a mapping in place of others.

        `plain` converts other mappings and named tuples to dicts and tuples.
        """
        return _map_tensors((self.args, self.kwargs), lambda path, _: tensors.get(path[1:]), plain)


def bind_sample(model: torch.nn.Module, sample_input: Any) -> Call | None:
    """Return the call that `sample_input` of `export_for_inference` stands for; None without a sample."""
    takes_batch = isinstance(model, ComposerModel)
    args: tuple[Any, ...] = (sample_input,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample_input, tuple) and sample_input:
        *start, last = sample_input
        if isinstance(last, dict) and _accepts(model, start, last):  # the form of `torch.onnx.export`
            args, kwargs = tuple(start), last
        elif len(sample_input) == 1 or not takes_batch:
            args = sample_input
    elif isinstance(sample_input, Mapping) and not takes_batch and _accepts(model, (), sample_input):
        args, kwargs = (), {**sample_input}
    if all(value is None for value in args) and not kwargs:
        return None
    if takes_batch and len(args) > 1:
        args = (args,)  # the parts of one batch
    tensors = {
        path[1:]: tensor.detach().to("cpu", copy=True) for path, tensor in _tensors_by_path((args, kwargs)).items()
    }
    if not tensors:
        raise ValueError(
            f"`sample_input` must hold the tensors that the model is called with, got {type(sample_input).__name__}. "
            f"Pass a batch: a tensor, or a tuple, list or mapping of tensors."
        )
    return Call(args, kwargs, tensors, takes_batch)


def _accepts(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[Any, Any]) -> bool:
    """Return True if the model can be called with these arguments."""
    if not kwargs:
        return True
    if not all(isinstance(name, str) for name in kwargs) or (isinstance(model, ComposerModel) and len(args) != 1):
        return False
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@dataclass
class Signature:
    """The tensors that an exported model takes and returns.

    Attributes:
        call: The call of the model before the export.
        inputs: The place of each input in the call, by the name of the input.
        axes: The axes of each input whose sizes vary, with the names of the sizes.
        output_names: The user's names of the outputs.
        outputs: The names of the outputs, once `module` has run.
    """

    call: Call
    inputs: dict[str, TensorPath]
    axes: Mapping[str, Mapping[int, str]]
    output_names: list[str] | None
    outputs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        texts = []
        for name, path in self.inputs.items():
            sizes = [str(self.axes[name].get(axis, size)) for axis, size in enumerate(self.call.tensors[path].shape)]
            texts.append(f"{name} ({', '.join(sizes)})")
        return ", ".join(texts)

    def zeros(self) -> dict[str, torch.Tensor]:
        """Return inputs to trace with: zeros, as files store them, and two rows, as torch treats 1 as a constant."""
        other_sizes = {size for axes in self.axes.values() for axis, size in axes.items() if axis != 0}
        inputs = {}
        for name, path in self.inputs.items():
            shape = list(self.call.tensors[path].shape)
            for axis, size in self.axes[name].items():
                shape[axis] = max(2, shape[axis]) if size in other_sizes else 2
            inputs[name] = torch.zeros(shape, dtype=self.call.tensors[path].dtype)
        return inputs

    def module(self, model: torch.nn.Module, flat: bool) -> torch.nn.Module:
        """Return a module whose arguments are the inputs, and whose outputs are plain containers, or a flat tuple."""
        signature = self

        class Inference(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                given = {**dict(zip(signature.inputs, args, strict=False)), **kwargs}
                args, kwargs = signature.call.arguments({path: given[n] for n, path in signature.inputs.items()})
                outputs = _plain_outputs(self.model(*args, **kwargs))
                tensors = _tensors_by_path(outputs)
                signature.outputs = _numbered("output", len(tensors))
                if isinstance(outputs, dict):
                    signature.outputs = ["_".join(map(str, path)) for path in tensors]
                if flat or signature.output_names is None:
                    return tuple(tensors.values()) if flat else outputs
                return dict(zip(signature.output_names, tensors.values(), strict=False))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("self", *self.inputs)]
        Inference.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by torch
        return Inference().eval()

    def check_outputs(self, dynamic_axes: DynamicAxes | None) -> None:
        """Raise ValueError if names of the user do not fit the outputs, which are known after an export."""
        names = self.output_names
        if names is not None and (len(names) != len(self.outputs) or len({*names}) != len(names)):
            raise ValueError(
                f"`output_names` must be one name for each output, of which the model has {len(self.outputs)} "
                f"({', '.join(self.outputs)}), got {names!r}."
            )
        unknown = {*(dynamic_axes or ())} - {*self.inputs, *(names or self.outputs)}
        if unknown:
            raise ValueError(
                f"`dynamic_axes` must have the names of inputs ({', '.join(self.inputs)}), got {unknown.pop()!r}. "
                f"Pass `input_names` to choose other names."
            )


def infer_signature(
    call: Call,
    dynamic_axes: DynamicAxes | None,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> Signature:
    """Return the signature of the exported model; the arguments are those of `export_for_inference`."""
    inputs = _choose_inputs(call, input_names)
    axes_by_name: dict[str, dict[int, str]] = {}
    for name, path in inputs.items():
        default = {0: "batch"} if dynamic_axes is None and call.has_rows(path) else {}
        given = (dynamic_axes or {}).get(name, default)
        axes = dict(given) if isinstance(given, Mapping) else {axis: f"{name}_axis_{axis}" for axis in given}
        dim = call.tensors[path].dim()
        if any(not -dim <= axis < dim for axis in axes):
            raise ValueError(f"`dynamic_axes` must have axes of {name!r}, which has {dim}, got {list(axes)}.")
        axes_by_name[name] = {axis % dim: size for axis, size in axes.items()}
    return Signature(call, inputs, axes_by_name, None if output_names is None else list(output_names))


def _choose_inputs(call: Call, input_names: Sequence[str] | None) -> dict[str, TensorPath]:
    """Return the tensors that are inputs, by name: those that `input_names` chooses, or all but labels and targets."""
    paths = list(call.tensors)
    if call.is_named:
        by_name = {_name(call, path): path for path in paths}
        if input_names and {*input_names} <= by_name.keys():
            return {_identifier(name): by_name[name] for name in input_names}
        defaults = {name: path for name, path in by_name.items() if path[-1] != "labels"}
        counts = range(len(defaults), len(defaults) + 1)
    else:
        inputs = paths
        if call.takes_batch and isinstance(call.args[0], (list, tuple)) and len(call.args[0]) == 2:
            inputs = [path for path in paths if path[1] == 0] or paths  # the batch is (inputs, targets)
        defaults = dict(zip(_numbered("input", len(inputs)), inputs, strict=True))
        counts = range(1, len(paths) + 1)
    if input_names is None:
        return {_identifier(name): path for name, path in defaults.items()}
    if len(input_names) not in counts or len({*input_names}) != len(input_names):
        rule = f"keys of the sample, or one name for each input, of which the model has {len(defaults)}"
        if not call.is_named:
            rule = f"different names for the first of the {len(paths)} tensors of the sample; by default the model has"
        raise ValueError(f"`input_names` must be {rule} ({', '.join(defaults)}), got {list(input_names)!r}.")
    unusable = [name for name in input_names if _identifier(name) != name]
    if unusable:
        raise ValueError(f"`input_names` must be Python identifiers, got {unusable[0]!r}.")
    return dict(zip(input_names, defaults.values() if call.is_named else paths, strict=False))


def _name(call: Call, path: TensorPath) -> str:
    """Return the keys that lead to a tensor as a name."""
    if isinstance(path[0], int):  # a positional argument
        path = path[1:] or ("input",) if len(call.args) == 1 else ("input", *path)
    return "_".join(map(str, path))


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}_{index}" for index in range(count)]


def _identifier(name: str) -> str:
    name = re.sub(r"^(?=\d)|\W", "_", name)
    return f"{name}_" if keyword.iskeyword(name) else name


def _plain_outputs(outputs: Any) -> Any:
    """Return outputs as dicts, lists and tuples of tensors, without other entries of mappings, such as caches."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        plain = {}
        for key, item in outputs.items():
            with suppress(OutputError):
                plain[str(key)] = _plain_outputs(item)
        return {key: item for key, item in plain.items() if _tensors_by_path(item)}
    if isinstance(outputs, (tuple, list)):
        items = [_plain_outputs(item) for item in outputs]
        return items if isinstance(outputs, list) else tuple(items)
    raise OutputError(
        f"`model` must return tensors, or tuples, lists and mappings of tensors, to be exported, but there is "
        f"{type(outputs).__name__} in its outputs. Pass a transform that returns a module without it."
    )


def _tensors_by_path(value: Any) -> dict[TensorPath, torch.Tensor]:
    tensors: dict[TensorPath, torch.Tensor] = {}
    _map_tensors(value, tensors.setdefault)
    return tensors


# `torch.utils._pytree` is private, and takes mappings other than dicts, such as a tokenizer's encoding, as leaves.
def _map_tensors(
    value: Any, change: Callable[[TensorPath, torch.Tensor], Any], plain: bool = False, path: TensorPath = ()
) -> Any:
    """Return nested containers with `change(path, tensor)` for each tensor, without entries that become None."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        changed = {key: _map_tensors(item, change, plain, (*path, key)) for key, item in value.items()}
        items = {key: item for key, item in changed.items() if item is not None or value[key] is None}
        with suppress(TypeError):  # the class may take other arguments
            return items if plain or type(value) is dict else type(value)(items)  # type: ignore[call-arg]
        return items
    if isinstance(value, (list, tuple)):
        parts = [_map_tensors(item, change, plain, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, list):
            return parts
        return type(value)._make(parts) if hasattr(value, "_make") and not plain else tuple(parts)
    return value
