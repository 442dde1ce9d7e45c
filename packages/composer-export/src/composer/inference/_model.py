"""The model that is exported: a copy of the trained one on the CPU, changed and loaded as asked for."""

from __future__ import annotations

import copy
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from composer.checkpoint.export import read_weights
from composer.checkpoint.sharded_tensors import is_sharded
from composer.core import Algorithm, Engine, Event, State
from composer.models import ComposerModel
from composer.utils import ensure_tuple, unwrapped_model

__all__ = ["SurgeryAlgorithm", "Transform", "check_exportable", "prepared", "quantize_dynamic"]

log = logging.getLogger(__name__)

Transform: TypeAlias = Callable[[torch.nn.Module], torch.nn.Module]
"""Changes a model in evaluation mode before it is exported: takes it and returns it, or another one."""

SurgeryAlgorithm: TypeAlias = Algorithm | Callable[[torch.nn.Module], torch.nn.Module | None]

_TORCH_AO = re.compile(r"(?s).*(torch\.ao\.quantization|torch\.quantize_per_tensor|torch\.jit|quantized tensor).*")


def quantize_dynamic(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Quantize the weights of linear layers to 8 bits, and their inputs while they run. A `Transform`.

    This is `torch.ao.quantization.quantize_dynamic`, which torch has deprecated in favour of the package `torchao`.
    A model quantized by this one can be exported to TorchScript only.

    Args:
        model: The model, in evaluation mode.
        *args: What torch's function takes after the model.
        **kwargs: Likewise; by default `qconfig_spec={torch.nn.Linear}`, `dtype=torch.qint8`.

    Returns:
        A quantized copy.

    Raises:
        RuntimeError: This release of torch does not have it any more.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> quantize_dynamic(model)[0].weight().dtype
        torch.qint8
    """
    torch_ao = getattr(getattr(torch, "ao", None), "quantization", None)
    if torch_ao is None or not hasattr(torch_ao, "quantize_dynamic"):
        raise RuntimeError(
            f"torch {torch.__version__} has no dynamic quantization any more. Use a function of `torchao` as a "
            f"transform: `lambda model: (torchao.quantization.quantize_(model, config), model)[1]`."
        )
    if not args:
        kwargs.setdefault("qconfig_spec", {torch.nn.Linear})
    if len(args) < 2:
        kwargs.setdefault("dtype", torch.qint8)
    with warnings.catch_warnings():  # the docstring says it
        warnings.filterwarnings("ignore", _TORCH_AO.pattern)
        quantized: torch.nn.Module = torch_ao.quantize_dynamic(model, *args, **kwargs)
    return quantized


def check_exportable(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside `DistributedDataParallel` and `torch.compile`, if this process has all of it.

    Args:
        model: The model.

    Raises:
        TypeError: It is no module.
        ValueError: It is divided among ranks, or its weights have no values.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a `torch.nn.Module`, got {type(model).__name__}.")
    inner = unwrapped_model(model)
    is_divided = any(map(is_sharded, inner.parameters())) or any(
        cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for m in inner.modules() for cls in type(m).__mro__
    )
    if is_divided:
        raise ValueError(
            "`model` must be whole on one rank to be exported, but its parameters are divided among ranks. Save a "
            "checkpoint, which gathers them (`trainer.save_checkpoint`), then build the model without sharding in one "
            "process and pass the checkpoint as `load_path`: `export_for_inference(model, ..., load_path=...)`."
        )
    if any(tensor.is_meta for tensor in inner.parameters()):
        raise ValueError("`model` must have weights, but its parameters are on the meta device. Initialise it first.")
    return inner


def prepared(
    model: torch.nn.Module,
    surgery_algs: SurgeryAlgorithm | Sequence[SurgeryAlgorithm] | None,
    load_path: str | os.PathLike[str] | None,
    load_object_store: Any,
    load_strict: bool,
    transforms: Transform | Sequence[Transform] | None,
) -> torch.nn.Module:
    """A copy of the model on the CPU in evaluation mode, after surgery, loading and transforms, in this order.

    Args:
        model: The model, which is not changed.
        surgery_algs: As in `export_for_inference`, like all others.
        load_path: The checkpoint.
        load_object_store: Where it is.
        load_strict: Whether names must match.
        transforms: The transforms.
    """
    made = _copy_on_cpu(model)
    for algorithm in ensure_tuple(surgery_algs):
        made = _operated(made, algorithm)
    if load_path is not None:
        _load(made, load_path, load_object_store, load_strict)
    made.eval()
    for transform in ensure_tuple(transforms):
        made = _module_of(transform(made), "transforms", transform)
    return made.eval()


def _copy_on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """A copy on the CPU, made without another one on the model's device, and without gradients."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in (*tensors, *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                value = parameter.detach().to("cpu", copy=True)
                memo[id(parameter)] = torch.nn.Parameter(value, parameter.requires_grad)
        if isinstance(module, ComposerModel):  # a logger holds open files
            memo[id(module.logger)] = None
    made: torch.nn.Module = unwrapped_model(copy.deepcopy(model, memo))
    for module in made.modules():
        for name, child in module._modules.items():
            if child is not None:  # parts that are compiled on their own
                module._modules[name] = unwrapped_model(child)
        if isinstance(module, ComposerModel):
            module.logger = None
    return made


def _operated(model: torch.nn.Module, algorithm: Any) -> torch.nn.Module:
    if not isinstance(algorithm, Algorithm):
        changed = algorithm(model)
        return model if changed is None else _module_of(changed, "surgery_algs", algorithm)
    state = State(model=model, max_duration="1ep", rank_zero_seed=0, algorithms=[algorithm])
    if not algorithm.match(Event.INIT, state):
        raise ValueError(
            f"`surgery_algs` must change the model, but `{type(algorithm).__name__}` does nothing at the beginning of "
            f"a run. Leave it out."
        )
    Engine(state).run_event(Event.INIT)
    return state.model


def _module_of(value: Any, argument: str, function: Any) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise TypeError(
            f"`{argument}` must return the model, but {getattr(function, '__name__', function)!r} returned "
            f"{type(value).__name__}. Return the module."
        )
    return value


def _load(model: torch.nn.Module, path: str | os.PathLike[str], object_store: Any, strict: bool) -> None:
    weights = read_weights(path, object_store)
    own = model.state_dict(keep_vars=True)
    if not own.keys() & weights.keys():
        raise RuntimeError(
            f"The checkpoint {os.fspath(path)!r} has no weights of this model: it has {sorted(weights)[:3]}, the model "
            f"{sorted(own)[:3]}. Is it the checkpoint of another model, or is an algorithm missing in `surgery_algs`?"
        )
    missing, unexpected = model.load_state_dict(weights, strict=strict)
    if missing or unexpected:
        warnings.warn(
            f"Not all weights of {os.fspath(path)!r} fit the model: it lacks {missing}, and has {unexpected} besides. "
            f"Pass `load_strict=True` to make this an error.",
            stacklevel=5,
        )
