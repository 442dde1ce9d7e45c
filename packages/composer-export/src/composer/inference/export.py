"""Exporting a model for inference."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from composer.checkpoint.export import read_weights
from composer.checkpoint.storage import storage_of
from composer.core import Algorithm, Engine, Event, State
from composer.inference.call import DynamicAxes, bind_sample
from composer.inference.formats import ExportFormat, check_format, write
from composer.models import ComposerModel
from composer.utils import dist, ensure_tuple, format_name_with_dist, is_uri, unwrapped_model

if TYPE_CHECKING:
    from composer.loggers import Logger

Transform: TypeAlias = Callable[[torch.nn.Module], torch.nn.Module]
"""A function that takes a model in evaluation mode and returns the model to export: the same one or another."""

SurgeryAlgorithm: TypeAlias = Algorithm | Callable[[torch.nn.Module], torch.nn.Module | None]

_WARNINGS_OF_TORCH_AO = r"(?s).*(torch\.ao\.quantization|torch\.quantize_per_tensor|torch\.jit|quantized tensor).*"


def export_for_inference(
    model: torch.nn.Module,
    save_format: str | ExportFormat,
    save_path: str | os.PathLike[str],
    save_object_store: Any = None,
    sample_input: Any = None,
    dynamic_axes: DynamicAxes | None = None,
    surgery_algs: SurgeryAlgorithm | Sequence[SurgeryAlgorithm] | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    onnx_opset_version: int | None = None,
    load_path: str | os.PathLike[str] | None = None,
    load_object_store: Any = None,
    load_strict: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> list[Path]:
    """Write a model to a file that runs without the code of the model. Rank 0 writes; other ranks return immediately.

    A copy of the model on the CPU is exported: the model keeps its mode, device, gradients and hooks. First
    `surgery_algs` change the copy, then weights are loaded, then `transforms` change it in evaluation mode.

    With `"torch_export"` and `"onnx"` the exported model takes tensors as arguments:

    - for a batch `(inputs, targets)` of a `ComposerModel`, the inputs, by position; the model is given None as targets;
    - for a mapping, all entries except `labels`, by name;
    - otherwise all tensors of the sample, by position, or by name for keyword arguments.

    `input_names` chooses others. The log shows the inputs and outputs. The batch size may vary unless `dynamic_axes` is
    given. With `"torchscript"` the exported model is called like the model itself, with a whole batch.

    Args:
        model: The model, possibly wrapped by DDP or `torch.compile`. A `ComposerModel` or any other module.
        save_format: `"torch_export"` (PyTorch's own format, `.pt2`), `"onnx"` (needs `pip install
            'composer-export[onnx]'`) or `"torchscript"` (deprecated in PyTorch; compiled, or else traced).
        save_path: A local path, the URI of any store that fsspec supports, or a name in `save_object_store`. An earlier
            file is replaced when the new one is complete. Weights of 2 GiB or more do not fit into the file of an ONNX
            model, and are written to a second file, which ends in `.data`.
        save_object_store: An object store.
        sample_input: A batch as in training. For modules other than a `ComposerModel`, a tuple holds positional
            arguments, and a dict keyword arguments. The form of `torch.onnx.export` also works: positional
            arguments, then a dict of keyword arguments, such as `(batch, {})`. Only `"torchscript"` works without a
            sample, if the model compiles.
        dynamic_axes: Axes whose sizes vary, by the name of the input: `{"image": {0: "batch", 2: "height"}}`. None: the
            first axis of every input that has as many rows as the first tensor. `{}`: none.
        surgery_algs: Algorithms that changed the model in training, if this one has not been changed yet: algorithms,
            or functions that take a model and change it or return another.
        transforms: Functions that take the model and return it, such as `quantize_dynamic`.
        onnx_opset_version: The version of ONNX's operators; None for torch's default.
        load_path: A checkpoint to load weights from: of a run or of a model, in one file or sharded, or safetensors.
        load_object_store: The object store of `load_path`, or a logger that stores files.
        load_strict: True to raise an error unless the names of all weights match; otherwise a warning lists them.
        input_names: Names of the inputs. Keys of a mapping choose its entries, even `labels`. For tensors passed by
            position, n names choose the first n tensors of the sample; the model is given None for the others.
        output_names: Names of the outputs; with `"torch_export"` the exported model then returns a dict. None: the keys
            of the outputs if these are a mapping, otherwise `"output"`, or `"output_0"` and so on.

    Returns:
        The files, if they are on this machine and written by this rank.

    Raises:
        ValueError: An argument has an invalid value, or the model is sharded.
        TypeError: An argument has a wrong type, or the model returns something other than tensors.
        ModuleNotFoundError: The format or the store needs a package that is not installed.
        RuntimeError: The model cannot be exported to this format, or the weights do not match.
        OSError: The file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from composer.testing import SimpleModel
        >>> batch = (torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
        >>> with TemporaryDirectory() as folder:
        ...     [file] = export_for_inference(
        ...         SimpleModel(), "torch_export", f"{folder}/model.pt2", sample_input=batch
        ...     )
        ...     model = torch.export.load(file).module()
        >>> model(torch.zeros(7, 1, 8, 8)).shape
        torch.Size([7, 2])

    Differs: `"torch_export"` is new. ONNX is written by the exporter that builds on `torch.export`; axis 0 varies by
        default. A model in DDP is unwrapped.
    """
    checked_format = check_format(save_format)
    path = check_destination(checked_format, save_path, save_object_store)
    inner = check_exportable(model)
    if dist.get_global_rank() != 0:
        return []
    call = bind_sample(inner, sample_input)
    with torch.random.fork_rng(devices=[]):  # surgery may draw random numbers
        prepared = _copy_to_cpu(inner)
        for algorithm in ensure_tuple(surgery_algs):
            prepared = _apply_surgery(prepared, algorithm)
        if load_path is not None:
            _load_weights(prepared, load_path, load_object_store, load_strict)
        prepared.eval()
        for transform in ensure_tuple(transforms):
            prepared = _check_module(transform(prepared), "transforms", transform)
        prepared.eval()
        is_local = save_object_store is None and not is_uri(path)
        folder = Path(path).parent if is_local else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            file = Path(scratch) / Path(path).name
            names = (input_names, output_names)
            write(checked_format, prepared, call, file, dynamic_axes, *names, onnx_opset_version)
            return _deliver(file, path, save_object_store)


def export_with_logger(
    model: torch.nn.Module,
    save_format: str | ExportFormat,
    save_path: str | os.PathLike[str],
    logger: Logger,
    save_object_store: Any = None,
    sample_input: Any = None,
    transforms: Transform | Sequence[Transform] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Export the model of a run, and pass the file to its loggers that store files; see `export_for_inference`.

    Args:
        model: The model.
        save_format: The format.
        save_path: Where to write; may contain `{run_name}` and the like. A local path is also the name of the file in
            loggers that store files.
        logger: The run's logger.
        save_object_store: An object store.
        sample_input: A batch.
        transforms: Functions that take the model and return it.
        input_names: Names of the inputs.
        output_names: Names of the outputs.

    Raises:
        Exception: As in `export_for_inference`.

    Differs: the file also stays on this machine, because a logger may not store every file.
    """
    path = format_name_with_dist(os.fspath(save_path), logger._state.run_name)
    files = export_for_inference(
        model,
        save_format,
        path,
        save_object_store,
        sample_input=sample_input,
        transforms=transforms,
        input_names=input_names,
        output_names=output_names,
    )
    if not logger.has_file_upload_destination():
        return
    folder = path[: len(path) - len(Path(path).name)]
    for file in files:
        # Loggers format both names.
        local, remote = (str(name).replace("{", "{{").replace("}", "}}") for name in (file, f"{folder}{file.name}"))
        logger.upload_file(remote, local, overwrite=True)


def quantize_dynamic(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Quantize the weights of linear layers to 8 bits, and their inputs at run time. A `Transform`.

    This is `torch.ao.quantization.quantize_dynamic`, which torch has deprecated in favor of the package `torchao`.
    A model quantized by it can be exported to TorchScript only.

    Args:
        model: The model, in evaluation mode.
        *args: Further arguments of torch's function.
        **kwargs: Likewise; by default `qconfig_spec={torch.nn.Linear}`, `dtype=torch.qint8`.

    Returns:
        A quantized copy.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> quantize_dynamic(model)[0].weight().dtype
        torch.qint8
    """
    if not args:
        kwargs.setdefault("qconfig_spec", {torch.nn.Linear})
    if len(args) < 2:
        kwargs.setdefault("dtype", torch.qint8)
    with warnings.catch_warnings():  # the docstring mentions the deprecation
        warnings.filterwarnings("ignore", _WARNINGS_OF_TORCH_AO)
        quantized: torch.nn.Module = torch.ao.quantization.quantize_dynamic(model, *args, **kwargs)
    return quantized


def check_exportable(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside `DistributedDataParallel` and `torch.compile`, if this process has all of its weights.

    Args:
        model: The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: The model is sharded, or its weights have no values.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a `torch.nn.Module`, got {type(model).__name__}.")
    inner = unwrapped_model(model)
    if any(isinstance(parameter, DTensor) for parameter in inner.parameters()) or any(
        cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for m in inner.modules() for cls in type(m).__mro__
    ):
        raise ValueError(
            "`model` must be whole on one rank to be exported, but its parameters are sharded across ranks. Save a "
            "checkpoint, which gathers them (`trainer.save_checkpoint`), then build the model without sharding in one "
            "process and pass the checkpoint as `load_path`: `export_for_inference(model, ..., load_path=...)`."
        )
    if any(tensor.is_meta for tensor in inner.parameters()):
        raise ValueError("`model` must have weights, but its parameters are on the meta device. Initialize it first.")
    return inner


def check_destination(save_format: ExportFormat, save_path: str | os.PathLike[str], save_object_store: Any) -> str:
    """Return the path as text, if a file can be saved there.

    Args:
        save_format: The format.
        save_path: As in `export_for_inference`.
        save_object_store: As in `export_for_inference`.

    Raises:
        TypeError: `save_object_store` is not an object store.
        ValueError: The path has no file name, the wrong suffix, or an unknown scheme.
        ModuleNotFoundError: The store needs a package that is not installed.
    """
    path = os.fspath(save_path) if save_object_store is not None else os.path.expanduser(save_path)
    if path[-1:] in ("", "/") or Path(path).is_dir():
        raise ValueError(f"`save_path` must be the path of a file, got {path!r}. Append a name, such as 'model.pt2'.")
    if save_format is ExportFormat.TORCH_EXPORT and not path.endswith(".pt2"):
        raise ValueError(f"`save_path` must end in '.pt2', which `torch.export.load` requires, got {path!r}.")
    if save_object_store is not None:
        if not hasattr(save_object_store, "upload_object"):
            raise TypeError(
                f"`save_object_store` must have a method `upload_object`, got {save_object_store!r}. Pass an object "
                f"store, or leave it out and pass a URI as `save_path`."
            )
    elif is_uri(path):
        storage_of(path.rpartition("/")[0])
    return path


def _deliver(file: Path, path: str, object_store: Any) -> list[Path]:
    """Move or upload a file and those beside it; the file itself comes last, so that it never lacks the others."""
    files = sorted(file.parent.iterdir(), key=lambda each: (each == file, each.name))
    folder = path.rpartition("/")[0]
    if object_store is None and not is_uri(path):
        targets = [Path(path).with_name(each.name) for each in files]
        for each, target in zip(files, targets, strict=True):
            with each.open("rb+") as written:
                os.fsync(written.fileno())
            os.replace(each, target)
        return targets
    if object_store is None:
        storage = storage_of(folder)
        for each in files:
            storage.upload(each, each.name)
        return []
    prefix = f"{folder}/" if folder else ""
    for each in files:
        object_store.upload_object(object_name=f"{prefix}{each.name}", filename=str(each))
    return []


def _copy_to_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy on the CPU without gradients; no second copy is made on the model's device."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        attributes = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in (*attributes, *module._buffers.values(), *module._parameters.values()):
            if tensor is None or id(tensor) in memo:
                continue
            copied = tensor.detach().to("cpu", copy=True)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        if isinstance(module, ComposerModel):  # a logger holds open files
            memo[id(module.logger)] = None
    copied_model: torch.nn.Module = unwrapped_model(copy.deepcopy(model, memo))
    for module in copied_model.modules():
        for name, child in module._modules.items():
            if child is not None:  # parts compiled one by one
                module._modules[name] = unwrapped_model(child)
        if isinstance(module, ComposerModel):
            module.logger = None
    return copied_model


def _apply_surgery(model: torch.nn.Module, algorithm: SurgeryAlgorithm) -> torch.nn.Module:
    if not isinstance(algorithm, Algorithm):
        changed = algorithm(model)
        return model if changed is None else _check_module(changed, "surgery_algs", algorithm)
    state = State(model=model, max_duration="1ep", rank_zero_seed=0, algorithms=[algorithm])
    if not algorithm.match(Event.INIT, state):
        raise ValueError(
            f"`surgery_algs` must change the model, but `{type(algorithm).__name__}` does nothing at the start of a "
            f"run. Leave it out."
        )
    Engine(state).run_event(Event.INIT)
    return state.model


def _check_module(value: Any, argument: str, function: Any) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise TypeError(
            f"`{argument}` must return the model, but {getattr(function, '__name__', function)!r} returned "
            f"{type(value).__name__}. Return the module."
        )
    return value


def _load_weights(model: torch.nn.Module, path: str | os.PathLike[str], object_store: Any, strict: bool) -> None:
    weights = read_weights(path, object_store)
    names = model.state_dict(keep_vars=True).keys()
    if not names & weights.keys():
        raise RuntimeError(
            f"The checkpoint {os.fspath(path)!r} has no weights of this model: it has {sorted(weights)[:3]}, the model "
            f"{sorted(names)[:3]}. Is it the checkpoint of another model, or is an algorithm missing in `surgery_algs`?"
        )
    missing, unexpected = model.load_state_dict(weights, strict=strict)
    if missing or unexpected:
        warnings.warn(
            f"Not all weights of {os.fspath(path)!r} fit the model: {missing} are missing, and {unexpected} are "
            f"unexpected. Pass `load_strict=True` to make this an error.",
            stacklevel=3,
        )
