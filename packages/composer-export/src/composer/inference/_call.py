"""How a model is called with a sample: which tensors there are in it, and which of them the model uses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composer.inference._outputs import tensors_in
from composer.models import ComposerModel

__all__ = ["Call", "Path", "call_of", "host_copy", "inputs_only"]

log = logging.getLogger(__name__)

Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes."""

    path: Path


@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments of a model, with their tensors apart.

    Args:
        args: The positional arguments, with a slot in the place of each tensor.
        kwargs: The keyword arguments, likewise.
        tensors: The tensors by their paths in `(args, kwargs)`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[Path, torch.Tensor]

    @property
    def is_named(self) -> bool:
        """Whether the model takes its tensors by names: from one mapping, or as keyword arguments."""
        return bool(self.kwargs) or (len(self.args) == 1 and isinstance(self.args[0], Mapping))

    def filled(self, tensors: Mapping[Path, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors.

        Args:
            tensors: Tensors by path.
        """
        return _filled(self.args, tensors), _filled(self.kwargs, tensors)

    def run(self, model: torch.nn.Module) -> Any:
        """Call a model with the sample's tensors, without gradients."""
        args, kwargs = self.filled(self.tensors)
        with torch.no_grad():
            return model(*args, **kwargs)

    def without(self, paths: Sequence[Path]) -> Call:
        """The same call without some tensors: entries of mappings are left out, others are None."""
        left = {path: tensor for path, tensor in self.tensors.items() if path not in paths}
        return Call(_without(self.args, paths), _without(self.kwargs, paths), left)

    def with_rows(self, count: int) -> Call:
        """The same call with a batch of another size: its first rows, or again from the first if it has fewer."""
        rows = self.num_rows
        if rows is None:
            return self
        index = torch.arange(count) % rows
        return self.with_tensors({p: t[index] if t.shape[:1] == (rows,) else t for p, t in self.tensors.items()})

    @property
    def num_rows(self) -> int | None:
        """The size of the batch: of the first dimension of the first tensor that has one, if it is not empty."""
        rows = next((tensor.shape[0] for tensor in self.tensors.values() if tensor.dim()), 0)
        return rows or None

    def with_tensors(self, tensors: dict[Path, torch.Tensor]) -> Call:
        """The same call with other tensors."""
        return Call(self.args, self.kwargs, tensors)


def call_of(model: torch.nn.Module, sample_input: Any) -> Call | None:
    """How a model is to be called with a sample.

    Args:
        model: The model.
        sample_input: As in `export_for_inference`.

    Returns:
        The call, with detached copies of the tensors on the CPU; None if there is no sample.
    """
    found = _arguments(model, sample_input)
    if found is None:
        return None
    tensors: dict[Path, torch.Tensor] = {}
    args = tuple(_with_slots(value, (index,), tensors) for index, value in enumerate(found[0]))
    kwargs = {name: _with_slots(value, (name,), tensors) for name, value in found[1].items()}
    if not tensors:
        raise ValueError(
            f"`sample_input` must hold the tensors that the model is called with, got {_described(sample_input)}. Pass "
            f"a batch: a tensor, or a tuple, list or mapping of tensors."
        )
    return Call(args, kwargs, tensors)


def host_copy(value: Any) -> Any:
    """A copy of nested tuples, lists and mappings whose tensors are detached copies on the CPU."""
    tensors: dict[Path, torch.Tensor] = {}
    return _filled(_with_slots(value, (), tensors), tensors)


def inputs_only(model: torch.nn.Module, call: Call, keep: Sequence[str] = ()) -> tuple[Call, Any]:
    """The call without what is there for training: `labels`, and tensors that the model does not compute with.

    Args:
        model: The model. It is run, with a few rows.
        call: How it is called.
        keep: Names of tensors that stay.

    Returns:
        The call, and the model's outputs.
    """
    small = call.with_rows(2)
    try:
        outputs = small.run(model)
    except Exception as error:  # noqa: BLE001 - it may ask for a certain size
        log.debug("The model does not run with two rows: %s", error)
        small, outputs = call, call.run(model)
    labels = [path for path in call.tensors if path[-1] == "labels" and call.is_named and "labels" not in keep]
    if labels and (found := _outputs_of(model, small.without(labels))) is not None:
        small, outputs = small.without(labels), found
    small = _used_only(model, small, outputs)
    return small.with_tensors({path: call.tensors[path] for path in small.tensors}), outputs


def _used_only(model: torch.nn.Module, call: Call, outputs: Any) -> Call:
    watch = _Watch(call.tensors.values())
    with watch:
        again = call.run(model)
    watch.see(tensors_in(again))
    unused = [path for path, tensor in call.tensors.items() if id(tensor) not in watch.seen]
    if len(unused) == len(call.tensors):
        return call
    shapes = [tensor.shape for tensor in tensors_in(outputs)]
    for path in unused:
        found = _outputs_of(model, call.without([path]))
        if found is not None and [tensor.shape for tensor in tensors_in(found)] == shapes:
            call = call.without([path])
    return call


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of some tensors operations take."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = {id(tensor) for tensor in tensors}
        self.seen: set[int] = set()

    def see(self, tensors: Any) -> None:
        self.seen |= self._wanted & {id(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(tensors_in([args, kwargs or {}]))
        return func(*args, **(kwargs or {}))


def _outputs_of(model: torch.nn.Module, call: Call) -> Any:
    """What a model returns; None if it cannot be called so."""
    if not call.tensors:
        return None
    try:
        return call.run(model)
    except Exception as error:  # noqa: BLE001 - any means that it needs what is left out, if only to unpack it
        log.debug("An input that the model does not compute with is kept: without it, %s", error)
        return None


def _arguments(model: torch.nn.Module, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and keyword arguments."""
    takes_batch = isinstance(model, ComposerModel)
    kwargs: dict[str, Any] = {}
    if isinstance(sample, tuple) and sample and isinstance(sample[-1], dict) and _takes(model, sample[:-1], sample[-1]):
        args, kwargs = sample[:-1], sample[-1]  # as torch.onnx takes them
    elif isinstance(sample, tuple) and (len(sample) == 1 or not takes_batch):
        args = sample
    elif isinstance(sample, Mapping) and not takes_batch and _takes(model, (), sample):
        return (), {**sample}
    else:
        args = (sample,)
    if all(value is None for value in args) and not kwargs:
        return None
    if takes_batch and len(args) > 1:
        args = (args,)  # a batch of several parts
    return args, kwargs


def _takes(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether these are arguments of the model."""
    if not kwargs:
        return True
    if not all(isinstance(name, str) for name in kwargs):
        return False
    if isinstance(model, ComposerModel) and len(args) != 1:
        return False
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _with_slots(value: Any, path: Path, found: dict[Path, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        found[path] = value.detach().to("cpu", copy=True)
        return _Slot(path)
    return _mapped(value, lambda key, item: _with_slots(item, (*path, key), found))


def _filled(value: Any, tensors: Mapping[Path, Any]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.path]
    return _mapped(value, lambda _, item: _filled(item, tensors))


def _without(value: Any, paths: Sequence[Path]) -> Any:
    if isinstance(value, _Slot):
        return None if value.path in paths else value
    if isinstance(value, Mapping):
        value = _like(value, {k: v for k, v in value.items() if not (isinstance(v, _Slot) and v.path in paths)})
    return _mapped(value, lambda _, item: _without(item, paths))


def _mapped(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A mapping, list or tuple of the same kind with changed items; anything else as it is."""
    if isinstance(value, Mapping):
        return _like(value, {key: change(key, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(index, item) for index, item in enumerate(value)))
    if isinstance(value, (list, tuple)):
        items = [change(index, item) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind, such as the encoding of a tokenizer, if its class can be called with a dict."""
    if type(value) is dict:
        return items
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _described(value: Any) -> str:
    return f"{type(value).__name__}" if not isinstance(value, (str, int, float)) else repr(value)
