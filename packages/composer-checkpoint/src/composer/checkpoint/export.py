"""Exporting a model's weights to a safetensors file, and loading them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer.checkpoint.durable import scratch_folder
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.run import fetch, local_checkpoint, read_checkpoint, read_local
from composer.checkpoint.safetensors import read_tensors, write_tensors
from composer.checkpoint.selection import Keys, Precision, check_precision, selected
from composer.checkpoint.state_dict import get_model_state_dict
from composer.checkpoint.storage import without_password
from composer.core import State
from composer.utils import is_uri, unwrapped_model
from composer.utils.collect_env import get_composer_env_dict

_NEEDED = ("model", "timestamp", "is_model_ddp", "_is_model_ddp_wrapped")

Source = State | torch.nn.Module | str | os.PathLike[str]


def export_safetensors(
    source: Source,
    path: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model's parameters and buffers to a safetensors file. Call it on every rank.

    Tied weights are stored once. The header holds the version, and the timestamp of the run if it is known. Read the
    file with `load_safetensors` or any other library that reads the format.

    Args:
        source: A run, a model, or a checkpoint: its path or URI.
        path: The file to create.
        precision: What floating tensors are converted to; None leaves them as they are.
        include_keys: Patterns of the names to include; None: all.
        ignore_keys: Patterns of names to leave out.
        overwrite: True if an existing file is replaced.

    Returns:
        `path`.

    Raises:
        FileExistsError: `path` exists, and `overwrite` is False.
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: The checkpoint is incomplete or modified.
        TypeError: `source` has another type, or the model's state holds anything but dense tensors.
        ValueError: The checkpoint has no model, or both kinds of keys are given.
        OSError: The file cannot be written; an earlier one is unchanged.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with TemporaryDirectory() as folder:
        ...     file = export_safetensors(model, Path(folder) / "model.safetensors")
        ...     load_safetensors(copy, file)
        ([], [])
        >>> torch.equal(model.weight, copy.weight)
        True
    """
    dtype, target = check_precision(precision), Path(path).expanduser()
    weights, time = _weights(source)
    names = selected(weights, include_keys, ignore_keys)

    def write() -> None:
        if target.exists() and not overwrite:
            raise FileExistsError(f"{str(target)!r} already exists. Pass `overwrite=True` to replace it.")
        header = {"composer_version": str(get_composer_env_dict()["composer_version"])}
        if time is not None:
            header["timestamp"] = json.dumps(time, default=lambda span: span.total_seconds())
        write_tensors({name: weights[name] for name in names}, target, header, dtype)

    on_first_rank(write)
    return target


def load_safetensors(
    module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a safetensors file into a module. Call it on every rank.

    Args:
        module: The module, wrapped by DDP or not. Tensors are copied into its own, in their precision.
        path: The file, or its URI.
        strict: True if its names and the module's must be the same. One name is enough for tied weights.

    Returns:
        The names that are missing in the file, and those that are unknown to the module.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        RuntimeError: `strict`, and names do not match; or shapes do not.
    """
    text = os.path.expanduser(path)
    with local_checkpoint(text) as file:
        tensors, _ = read_tensors(file)
    target = unwrapped_model(module)
    missing, unexpected = target.load_state_dict(tensors, strict=False)
    # A missing tensor that is tied to another one was loaded under the other's name.
    own = target.state_dict(keep_vars=True)
    filled = {id(own[name]) for name in tensors if name in own}
    missing = [name for name in missing if id(own.get(name)) not in filled]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(target).__name__}: missing in "
            f"{without_password(text)!r}: {missing}; unknown to the module: {unexpected}. Pass `strict=False` to load "
            f"what matches."
        )
    return missing, list(unexpected)


def read_weights(path: str | os.PathLike[str], object_store: Any = None) -> Mapping[str, Any]:
    """Read the weights of a model from a checkpoint onto the CPU. Not a collective operation.

    Args:
        path: The checkpoint of a run or of a model, in one file or in shards, or a file in the format of safetensors: a
            local path, a URI, or a name in `object_store`.
        object_store: An object store, or a logger that stores files.

    Returns:
        Tensors by name, without the prefixes of DDP.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: It is incomplete or modified.
        ValueError: The checkpoint has no model.
    """
    text = os.fspath(path) if object_store is not None else os.path.expanduser(path)
    if object_store is None and not is_uri(text):
        return _weights_of(read_local(Path(text), _NEEDED), text)[0]
    with scratch_folder("download") as folder:
        file = folder / Path(text).name
        fetch(text, file, object_store)
        return _weights_of(read_local(file, _NEEDED), text)[0]


def _weights(source: Source) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return a model's state, and the timestamp of the run."""
    if isinstance(source, State):
        return get_model_state_dict(source.model, precision=None), source.timestamp.state_dict()
    if isinstance(source, torch.nn.Module):
        return get_model_state_dict(source, precision=None), None
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"`source` must be a `State`, a module, or the path or URI of a checkpoint, got {source!r}.")
    return _weights_of(read_checkpoint(source, _NEEDED), os.fspath(source))


def _weights_of(content: Any, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    content, shown = content if isinstance(content, dict) else {}, without_password(name)
    saved = content.get("state")
    if not isinstance(saved, dict):
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return content, None  # the state of a model, as it is
        raise ValueError(f"{shown!r} is not a checkpoint of a run or of a model: it holds no named tensors.")
    if not isinstance(saved.get("model"), dict):
        raise ValueError(f"The checkpoint {shown!r} holds no model. Was it left out when it was saved?")
    weights = saved["model"]
    if saved.get("is_model_ddp") or saved.get("_is_model_ddp_wrapped"):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    time = saved.get("timestamp")
    return weights, next(iter(time.values()), None) if isinstance(time, dict) else None
