"""Saving the parts of a checkpoint to files of their own, from any loop.

::

    <folder>/ep1-ba100/model/model.pt          or model.safetensors, or shards
                       optim/optim.pt          or shards
                       resumption.pkl
                       composer_metadata.json  written last: completes the checkpoint

Each file is written with a checksum under a temporary name, flushed to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint.durable import atomic_write, sync_file
from composer.checkpoint.file import write_file
from composer.checkpoint.names import counts_of_name
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.safetensors import write_tensors
from composer.checkpoint.selection import Keys, Precision, check_keys, check_precision
from composer.checkpoint.sharded_tensors import is_sharded
from composer.checkpoint.shards import write_shards
from composer.checkpoint.state_dict import (
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
)
from composer.checkpoint.storage import without_password
from composer.core import Event, State, Time
from composer.utils import create_interval_scheduler, dist, format_name_with_dist_and_time, is_uri, plain_number

if TYPE_CHECKING:
    from composer.devices import Device

METADATA_NAME = "composer_metadata.json"
"""The file that is written last; a checkpoint without it is incomplete."""
RESUMPTION_NAME = "resumption.pkl"
_FORMATS = ("pt", "safetensors")


@dataclass
class CheckpointSaveOptions:
    """Options for saving checkpoints: content, format and frequency.

    Args:
        save_frequency: How often; see `is_due`.
        dir_prefix: The name of a checkpoint's folder; a format string with the variables of
            `composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE`.
        overwrite: Replace an existing checkpoint of this name.
        save_model: Save the model.
        save_optimizer: Save the optimizer.
        save_resumption_state: Save the rest of the run, which is needed to resume exactly.
        num_checkpoints_to_keep: The number of newest complete checkpoints, by the counts in their names, to keep in
            the folder; -1 keeps all. Checkpoints that another run has saved there stay.
        save_format: `"pt"`, or `"safetensors"`, for the model only: an optimizer is always saved as `"pt"`.
        sharded_checkpoint: True if each rank writes its own shards of a model that is sharded by FSDP.
        precision: The precision of the model's floating tensors; None: their own. The optimizer's are not converted.
        include_keys: Patterns of the names of parameters and buffers to save; None: all.
        ignore_keys: Patterns of names not to save.

    Raises:
        ValueError: An argument is invalid.
    """

    save_frequency: str | int | Time[Any] | Callable[[State, Event], bool] = "1ep"
    dir_prefix: str = "ep{epoch}-ba{batch}"
    overwrite: bool = False
    save_model: bool = True
    save_optimizer: bool = True
    save_resumption_state: bool = True
    num_checkpoints_to_keep: int = -1
    save_format: str = "pt"
    sharded_checkpoint: bool = False
    precision: Precision | None = "fp32"
    include_keys: Keys | None = None
    ignore_keys: Keys | None = None

    def __post_init__(self) -> None:
        check_keys(self.include_keys, self.ignore_keys)
        check_precision(self.precision)
        _check_format(self.save_format, self.sharded_checkpoint)
        self.num_checkpoints_to_keep = plain_number(self.num_checkpoints_to_keep)
        if self.num_checkpoints_to_keep != -1 and self.num_checkpoints_to_keep < 1:
            raise ValueError(
                f"`num_checkpoints_to_keep` must be at least 1, or -1 for all, got {self.num_checkpoints_to_keep!r}."
            )
        frequency = self.save_frequency
        self._schedule = frequency if callable(frequency) else create_interval_scheduler(frequency)

    def is_due(self, state: State, event: Event) -> bool:
        """Return True if it is time to save. Call it at each BATCH_, EPOCH_ and ITERATION_CHECKPOINT."""
        return self._schedule(state, event)


def save_checkpoint_to_disk(
    destination_dir: str | os.PathLike[str], state: State, options: CheckpointSaveOptions | None = None
) -> str:
    """Save a run now. Call it on every rank; all return when it is saved.

    Args:
        destination_dir: The folder of all checkpoints; a format string, as `dir_prefix`.
        state: The run.
        options: Options; by default everything is saved.

    Returns:
        The folder of this checkpoint.

    Raises:
        FileExistsError: A checkpoint of this name exists, and `overwrite` is False.
        ValueError: Shards of a whole model are requested.
        OSError: Something cannot be written.
        RuntimeError: Another rank failed.
    """
    options = CheckpointSaveOptions() if options is None else options
    folder = Path(_formatted(str(_local(destination_dir)), state)) / _formatted(options.dir_prefix, state)
    optimizers = state.optimizers if options.save_optimizer else []
    on_first_rank(lambda: _begin(folder, options.overwrite))
    shards, precision = options.sharded_checkpoint, options.precision
    keys = options.include_keys, options.ignore_keys
    if options.save_model:
        save_model_to_disk(
            state.model, folder / "model", shards, precision, *keys, overwrite=True, save_format=options.save_format
        )
    for optimizer, name in zip(optimizers, optimizer_folders("optim", len(optimizers)), strict=True):
        save_optim_to_disk(state.model, optimizer, folder / name, shards, None, *keys, overwrite=True)
    if options.save_resumption_state:
        save_resumption_state_to_disk(state, folder)
    size = state.device_train_microbatch_size
    metadata, run_name = folder / METADATA_NAME, state.run_name
    save_composer_metadata_to_disk(metadata, state.model, shards, precision, state.device, size, run_name)
    pattern, number = Path(options.dir_prefix).name, options.num_checkpoints_to_keep
    on_first_rank(lambda: _keep_newest(folder, pattern, number, run_name))
    return str(folder)


def optimizer_folders(first: str, number: int) -> list[str]:
    """Return the folders of the optimizers of a checkpoint: "optim", "optim2", "optim3", ..."""
    return [first if i == 0 else f"{first}{i + 1}" for i in range(number)]


def save_model_to_disk(
    model: torch.nn.Module,
    destination_dir: str | os.PathLike[str],
    sharded_checkpoint: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    overwrite: bool = False,
    save_format: str = "pt",
) -> str | None:
    """Save a model to `model.pt` or `model.safetensors` in a folder, or to the folder itself in shards.

    Call it on every rank; all return when it is saved.

    Args:
        model: The model, wrapped or not.
        destination_dir: The folder.
        sharded_checkpoint: True if each rank writes its own shards of a model that is sharded by FSDP.
        precision: The precision of floating tensors; None: their own.
        include_keys: Patterns of the names to save; None: all.
        ignore_keys: Patterns of names not to save.
        overwrite: Replace an existing one.
        save_format: `"pt"` or `"safetensors"`.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        ValueError: An argument is invalid, or shards of a whole model are requested.
        FileExistsError: It exists, and `overwrite` is False.
        OSError: It cannot be written.
    """
    folder = _local(destination_dir)
    _check_format(save_format, sharded_checkpoint)
    content = get_model_state_dict(model, sharded_checkpoint, precision, include_keys, ignore_keys)
    target = folder if sharded_checkpoint else folder / f"model.{save_format}"
    return save_state_dict_to_disk(content, target, overwrite, save_format)


def save_optim_to_disk(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    destination_dir: str | os.PathLike[str],
    sharded_checkpoint: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    overwrite: bool = False,
) -> str | None:
    """Save an optimizer to `optim.pt` in a folder, or to the folder itself in shards; see `save_model_to_disk`.

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: The optimizer.
        destination_dir: The folder.
        sharded_checkpoint: As for the model.
        precision: As for the model; step counts are not converted.
        include_keys: Patterns of the parameters to save the state of; None: all.
        ignore_keys: Patterns of parameters to leave out.
        overwrite: Replace an existing one.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        FileExistsError: It exists, and `overwrite` is False.
        OSError: It cannot be written.
        ValueError: A pattern or `precision` is invalid.
    """
    folder = _local(destination_dir)
    content = get_optim_state_dict(model, optimizer, sharded_checkpoint, precision, include_keys, ignore_keys)
    return save_state_dict_to_disk(content, folder if sharded_checkpoint else folder / "optim.pt", overwrite)


def save_composer_metadata_to_disk(
    destination_file_path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: Precision | None = None,
    device: Device | torch.device | str | None = None,
    device_train_microbatch_size: float | None = None,
    run_name: str | None = None,
) -> str | None:
    """Write the description of a checkpoint to a JSON file; see `get_metadata_state_dict`.

    Args:
        destination_file_path: The file, such as `composer_metadata.json`; an existing one is replaced.
        model: The model, for `get_metadata_state_dict`.
        sharded_state_dict: True if the checkpoint is in shards; None: unknown.
        precision: The precision of the run.
        device: The device of the run.
        device_train_microbatch_size: The number of samples in a forward pass.
        run_name: The name of the run.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        OSError: It cannot be written.
    """
    target = _local(destination_file_path)
    size = device_train_microbatch_size
    content = get_metadata_state_dict(model, sharded_state_dict, precision, device, size, run_name)

    def write() -> None:
        with atomic_write(target) as temporary:
            temporary.write_text(json.dumps(content, indent=4), encoding="utf-8")
            sync_file(temporary)

    return _written_by_first(write, target)


def save_resumption_state_to_disk(state: State, destination_dir: str | os.PathLike[str]) -> str | None:
    """Write the state besides model and optimizers to `resumption.pkl`, replacing an existing file.

    Args:
        state: The run.
        destination_dir: The folder.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        OSError: It cannot be written.
    """
    target = _local(destination_dir) / RESUMPTION_NAME
    content = get_resumption_state_dict(state)
    return _written_by_first(lambda: write_file(content, target), target)


def save_state_dict_to_disk(
    state_dict: dict[str, Any],
    destination_file_path: str | os.PathLike[str],
    overwrite: bool = False,
    save_format: str = "pt",
) -> str | None:
    """Save any state atomically, with a checksum. Call it on every rank.

    Args:
        state_dict: The state. If it holds sharded tensors, each rank writes its shards. Otherwise that of rank 0 is
            written.
        destination_file_path: The file; of shards, the folder.
        overwrite: Replace an existing one.
        save_format: `"pt"`, or `"safetensors"` for a state of named tensors.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        ValueError: `save_format` is another, or shards are to be saved as safetensors.
        TypeError: The format is safetensors, and a value is not a plain tensor.
        FileExistsError: It exists, and `overwrite` is False.
        OSError: It cannot be written.
    """
    target, shards = _local(destination_file_path), _has_shards(state_dict)
    _check_format(save_format, shards)
    if shards:
        write_shards(state_dict, target, overwrite)
        return str(target)

    def write() -> None:
        if target.exists() and not overwrite:
            raise FileExistsError(f"{str(target)!r} already exists. Pass `overwrite=True` to replace it.")
        if save_format == "safetensors":
            write_tensors(state_dict, target, {})
        else:
            write_file(state_dict, target)

    return _written_by_first(write, target)


def _written_by_first(write: Callable[[], None], target: Path) -> str | None:
    on_first_rank(write)
    return str(target) if dist.get_global_rank() == 0 else None


def _check_format(save_format: str, shards: bool) -> None:
    if save_format not in _FORMATS:
        raise ValueError(f"`save_format` must be one of {', '.join(map(repr, _FORMATS))}, got {save_format!r}.")
    if shards and save_format != "pt":
        raise ValueError(f"`save_format` must be 'pt' for a checkpoint in shards, got {save_format!r}.")


def _local(path: str | os.PathLike[str]) -> Path:
    if is_uri(os.fspath(path)):
        raise ValueError(
            f"The destination must be a local path, got {without_password(os.fspath(path))!r}. Save to a local folder, "
            f"then upload its files with `composer.checkpoint.upload_file`."
        )
    return Path(path).expanduser()


def _formatted(text: str, state: State) -> str:
    return format_name_with_dist_and_time(text, state.run_name, state.timestamp)


def _begin(folder: Path, overwrite: bool) -> None:
    """Remove the files that are replaced; from then on the checkpoint is incomplete."""
    if (folder / METADATA_NAME).exists() and not overwrite:  # without it, a killed process left an incomplete one
        raise FileExistsError(f"The checkpoint {str(folder)!r} already exists. Pass `overwrite=True` to replace it.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METADATA_NAME, RESUMPTION_NAME):
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():  # also the folders of optimizers that this run does not have
        if re.fullmatch(r"model|optim\d*", path.name):
            shutil.rmtree(path)


def _keep_newest(folder: Path, pattern: str, number: int, run_name: str) -> None:
    """Remove the oldest checkpoints beside `folder` that have the name pattern and record the name of the run."""
    if number == -1:
        return
    checkpoints = []
    for path in folder.parent.iterdir():
        counts, metadata = counts_of_name(path.name, pattern), path / METADATA_NAME
        if counts is None or path.is_symlink() or not metadata.is_file():
            continue
        if json.loads(metadata.read_text(encoding="utf-8")).get("run_name") == run_name:
            checkpoints.append((counts, path))
    for _, path in sorted(checkpoints, key=lambda pair: (pair[0], pair[1].stat().st_mtime_ns))[:-number]:
        (path / METADATA_NAME).unlink()  # first, so that the rest is never mistaken for a checkpoint
        shutil.rmtree(path)


def _has_shards(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_shards, value.values()))
    return is_sharded(value)
