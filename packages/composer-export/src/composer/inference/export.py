"""Exporting a model for inference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.inference._call import call_of
from composer.inference._destination import check_destination, deliver
from composer.inference._formats import ExportFormat, check_format
from composer.inference._model import SurgeryAlgorithm, Transform, check_exportable, prepared
from composer.inference._natural import DynamicAxes
from composer.inference._writers import write
from composer.utils import dist, format_name_with_dist

if TYPE_CHECKING:
    from composer.loggers import Logger

__all__ = ["export_for_inference", "export_with_logger"]


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
) -> None:
    """Write a model to a file that runs without the code that built it. Done by rank 0; others return at once.

    What is exported is a copy on the CPU: the model keeps its mode, device, gradients and hooks. First `surgery_algs`
    change the copy, then weights are loaded, then `transforms` change it in evaluation mode.

    Exported with `"torch_export"` or `"onnx"`, a model takes tensors as arguments, by the keys of the batch if that is
    a mapping, else by position, and only those that it computes with: a classifier that is given `(image, target)` in
    training takes the image. The log says which. The size of a batch may vary unless `dynamic_axes` says otherwise.
    With `"torchscript"` a model is called as before, with a whole batch.

    Args:
        model: The model, wrapped by DDP or `torch.compile` or not. A `ComposerModel` or any other module.
        save_format: `"torch_export"` (PyTorch's own format, `.pt2`), `"onnx"` (needs `pip install
            'composer-export[onnx]'`) or `"torchscript"` (deprecated in PyTorch; compiled, or else traced).
        save_path: Where to write: a local path, the URI of any store that fsspec knows, or a name in
            `save_object_store`. An earlier file is replaced when the new one is whole. Weights of 2 GiB or more do not
            fit into the file of an ONNX model, and are written beside it, to one that ends in `.data`.
        save_object_store: An object store.
        sample_input: A batch as the model is trained with. For a module that is no `ComposerModel` a tuple holds its
            positional arguments. Also `(batch, {})`, the form of `torch.onnx.export`: arguments, and a dict of keyword
            arguments. Its values matter to `"torchscript"` only, where it may be left out if the model compiles.
        dynamic_axes: Axes whose sizes vary, by the name of the input: `{"image": {0: "batch", 2: "height"}}`. None: the
            first axis of all inputs with as many rows as the first. `{}`: none.
        surgery_algs: Algorithms that change the model as the training run did, if this model is not changed already:
            those themselves, or functions that take a model and change it or return another.
        transforms: Functions that take the model and return it, such as `quantize_dynamic`.
        onnx_opset_version: The version of ONNX's operators; None is torch's choice.
        load_path: A checkpoint whose weights are loaded: of a run or of a model, whole or in shards, or of safetensors.
        load_object_store: Where `load_path` is: an object store, or a logger that keeps files.
        load_strict: Whether the names of the weights must match exactly; otherwise a warning says which do not.
        input_names: The names of the inputs. Those that are keys of the batch choose what the model is given: without
            `"labels"`, the model is exported as it runs without labels.
        output_names: The names of the outputs; with `"torch_export"` the model returns a dict then. None: the keys of
            what the model returns if that is a mapping, `"output"` or `"output_0"` and so on in ONNX otherwise.

    Raises:
        ValueError: An argument has a value that cannot work; the message says what to do. Also for a model that is
            divided among ranks.
        TypeError: An argument is of a type that cannot work, or the model returns something else than tensors.
        ModuleNotFoundError: The format or the store needs a package that is not installed.
        RuntimeError: The model cannot be exported in this way, or the weights do not match.
        OSError: The file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from composer.testing import SimpleModel
        >>> batch = (torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
        >>> with TemporaryDirectory() as folder:
        ...     file = f"{folder}/model.pt2"
        ...     export_for_inference(SimpleModel(), "torch_export", file, sample_input=batch)
        ...     model = torch.export.load(file).module()
        >>> model(torch.zeros(7, 1, 8, 8)).shape
        torch.Size([7, 2])

    Differs: `"torch_export"` is new. ONNX is made by torch's exporter that builds on `torch.export`; dimension 0 varies
        by default. A model in DDP is unwrapped.
    """
    _export(
        model,
        save_format,
        save_path,
        save_object_store,
        sample_input=sample_input,
        dynamic_axes=dynamic_axes,
        surgery_algs=surgery_algs,
        transforms=transforms,
        onnx_opset_version=onnx_opset_version,
        load_path=load_path,
        load_object_store=load_object_store,
        load_strict=load_strict,
        input_names=input_names,
        output_names=output_names,
    )


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
    """`export_for_inference` for a run. If one of its loggers stores files, it gets the exported model as well.

    Args:
        model: The model.
        save_format: The format.
        save_path: Where to write; may contain `{run_name}` and the like. A local path is also the name of the file for
            loggers that store files.
        logger: The run's logger.
        save_object_store: An object store.
        sample_input: A batch.
        transforms: Functions that take the model and return it.
        input_names: The names of the inputs.
        output_names: The names of the outputs.

    Raises:
        Exception: As in `export_for_inference`.

    Differs: the file stays on this machine, too, for a logger may be one that does not store every file.
    """
    path = format_name_with_dist(os.fspath(save_path), logger._state.run_name)
    files = _export(
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


def _export(
    model: torch.nn.Module,
    save_format: str | ExportFormat,
    save_path: str | os.PathLike[str],
    save_object_store: Any,
    *,
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
    """`export_for_inference`; returns the files, if they are on this machine."""
    found = check_format(save_format)
    destination = check_destination(found, save_path, save_object_store)
    inner = check_exportable(model)
    if dist.get_global_rank() != 0:
        return []
    call = call_of(inner, sample_input)
    with torch.random.fork_rng(devices=[]):  # whatever surgery draws, the run's random numbers stay
        made = prepared(inner, surgery_algs, load_path, load_object_store, load_strict, transforms)

        def write_to(file: Path) -> None:
            write(found, made, call, file, dynamic_axes, input_names, output_names, onnx_opset_version)

        return deliver(write_to, destination, save_object_store)
