"""A run's checkpoint as a folder: tensors that are divided among ranks in shards, everything else in one file.

::

    ep1-ba100/__0_0.distcp        the shards that rank 0 wrote, as `torch.distributed.checkpoint` has them
              __1_0.distcp        and so on
              .metadata           its index
              composer_states.pt  the rest, sealed; it holds the SHA-256 of all other files

The folder is written under a temporary name by all ranks, and renamed when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint._container import check_file, read_file, write_file
from composer.checkpoint._names import PartialFilePath
from composer.checkpoint._seal import CorruptCheckpointError
from composer.checkpoint._shards import read_shards, shapes_of_shards, write_shards
from composer.checkpoint.sharded_tensors import is_sharded
from composer.utils import dist
from composer.utils.iter_helpers import map_items

if TYPE_CHECKING:
    from composer.core import State

__all__ = [
    "STATES",
    "Shard",
    "amend_run",
    "check_run",
    "check_saves_shards",
    "download_run",
    "fetch_run",
    "files_of_run",
    "fill_shards",
    "is_sharded_run",
    "pattern_of_run",
    "proof_of_run",
    "read_run",
    "remove_run",
    "run_name_of",
    "write_run",
]

log = logging.getLogger(__name__)

STATES = "composer_states.pt"
_SHARD = "__shard__"
_BLOCK = 1 << 20


@dataclass
class Shard:
    """Stands for a tensor that is in the shards.

    Attributes:
        name: Its name there.
        shape: Its shape as a whole.
        dtype: Its dtype.
        folder: The checkpoint.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    folder: Path


def check_saves_shards(asynchronous: bool, uri: str | None) -> None:
    """Whether a run can save in shards.

    Args:
        asynchronous: Whether it is to save in the background.
        uri: Where it is to save, if that is not a folder.

    Raises:
        ValueError: It cannot.
    """
    if asynchronous:
        raise ValueError(
            "Checkpoints in shards are not written in the background: all ranks write them together. Leave "
            "`save_async` out, or use `state_dict_type='full'`."
        )
    if uri is not None and dist.get_local_world_size() < dist.get_world_size():
        raise ValueError(
            f"Checkpoints in shards of several nodes must be saved to a folder that all of them share, not to {uri!r}. "
            f"Use such a `save_folder`, or `state_dict_type='full'`."
        )


def pattern_of_run(state: State, files: PartialFilePath) -> PartialFilePath:
    """The names of a run's checkpoints: of files, or, next to where they would be, of folders that hold shards."""
    if not state.fsdp_sharded_state_dict_enabled:
        return files
    inside, _, _ = files.filename.rpartition("/")
    prefix = state.fsdp_config.sharded_ckpt_prefix_dir
    return PartialFilePath(f"{inside}/{prefix}" if inside else prefix, files.folder)


def proof_of_run(state: State, files: PartialFilePath) -> str:
    """The pattern of the files that tell that a checkpoint is there."""
    pattern = pattern_of_run(state, files)
    return pattern.filename if pattern is files else f"{pattern.filename}/{STATES}"


def is_sharded_run(path: str | Path) -> bool:
    """Whether a path is a checkpoint of this kind."""
    return (Path(path) / STATES).is_file()


def write_run(content: dict[str, Any], folder: Path, overwrite: bool) -> None:
    """Write a checkpoint: whole, or not at all. A collective operation.

    Args:
        content: What to save, on each rank with its parts of the tensors that are divided.
        folder: The folder to make, on a disk that all ranks share.
        overwrite: Whether an existing one is replaced.

    Raises:
        FileExistsError: The folder exists, and `overwrite` is False.
        OSError: It cannot be written.
        RuntimeError: Another rank failed, or ranks write to different disks.
    """
    shards: dict[str, Any] = {}
    rest = _taken_out(content, "", shards)

    def finish(temporary: Path) -> None:
        digests = {name: _digest(temporary / name) for name in _others(temporary)}
        _check_all_there(temporary, dist.get_world_size() if shards else 0)
        write_file({"content": rest, "folder": folder.name, "sha256": digests}, temporary / STATES)

    write_shards(shards, folder, overwrite, finish)


def amend_run(path: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """Change what a checkpoint, of either kind, says of how to go on, in place.

    Returns:
        Whether it says anything of that.
    """
    file = path / STATES if is_sharded_run(path) else path
    states = read_file(file)[0]
    content = states if file == path else states["content"]
    if "resumption" not in content:
        return False
    change(content["resumption"])
    write_file(states, file)
    return True


def remove_run(path: Path) -> None:
    """Remove a checkpoint of either kind. What is left if that is interrupted is no checkpoint any more."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    (path / STATES).unlink(missing_ok=True)
    shutil.rmtree(path)


def check_run(folder: Path) -> str | None:
    """Check a whole checkpoint without loading it.

    Returns:
        The name under which it was saved.

    Raises:
        CorruptCheckpointError: A file of it is missing, torn, truncated or altered.
    """
    check_file(folder / STATES)
    states = _states(folder)
    _check_digests(folder, states["sha256"], states["sha256"])
    name: str = states["folder"]
    return name


def read_run(folder: Path) -> tuple[dict[str, Any], str]:
    """Check a checkpoint, and load all but its shards, in whose places are `Shard` objects. A collective operation.

    Each rank checks some of the files.

    Returns:
        The content, and the name under which it was saved.

    Raises:
        CorruptCheckpointError: A file of it is missing, torn, truncated or altered.
    """
    states = _states(folder)
    names = sorted(states["sha256"])
    problem: CorruptCheckpointError | None = None
    try:
        _check_digests(folder, states["sha256"], names[dist.get_global_rank() :: dist.get_world_size()])
    except CorruptCheckpointError as error:
        problem = error
    for found in dist.all_gather_object(None if problem is None else problem.reason):
        if found is not None:
            raise CorruptCheckpointError(folder, found)
    return _put_back(states["content"], folder), states["folder"]


def run_name_of(folder: Path) -> str | None:
    """The name of the run that saved a checkpoint; None if it does not tell.

    Raises:
        CorruptCheckpointError: The file that tells is damaged.
    """
    name: str | None = _states(folder)["content"].get("state", {}).get("run_name")
    return name


def fill_shards(content: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Read the shards: of tensors that belong to a divided parameter this rank's part, of others all.

    A collective operation.

    Args:
        content: What `read_run` returned, or a part of it.
        parameters: The divided parameters by name.

    Returns:
        The content with tensors.

    Raises:
        CorruptCheckpointError: A tensor is not as the index of the shards has it.
    """
    _check_shapes(content, {})
    targets: dict[Path, dict[str, torch.Tensor]] = {}
    filled = _with_targets(content, parameters, None, targets)
    for folder, named in targets.items():
        read_shards(dict(named), folder)
    return filled


def files_of_run(path: Path, name: str) -> list[tuple[Path, str]]:
    """The files of a checkpoint of either kind and their names in a store; the last one names the others."""
    if not is_sharded_run(path):
        return [(path, name)]
    return [(path / file, f"{name}/{file}") for file in (*_others(path), STATES)]


def download_run(uri: str, target: Path, progress_bar: bool) -> bool:
    """Fetch a checkpoint of this kind, or the one that a link names.

    Args:
        uri: Where it is.
        target: The folder to make.
        progress_bar: Show the progress.

    Returns:
        Whether there is such a checkpoint.
    """
    from composer.checkpoint._get_file import linked_uris
    from composer.checkpoint._storage import Storage, storage_of
    from composer.checkpoint._store_errors import StorageError

    if uri.partition(":")[0] in ("http", "https"):  # which have no folders
        return False
    store: Storage | None = None
    try:
        stores = map(storage_of, (uri, *linked_uris(uri)))
        store = next((store for store in stores if store.exists(STATES)), None)
    except StorageError as error:  # it may allow to read what is there, but not to ask what is
        log.debug("Whether %s is in shards could not be found out: %s", uri, error)
    if store is None:
        return False
    return fetch_run(lambda name, path: store.download(name, path, progress=progress_bar), "", target)


def fetch_run(get: Callable[[str, Path], None], name: str, target: Path) -> bool:
    """Fetch a checkpoint of this kind, file by file.

    Args:
        get: Fetches a file of some name to a path.
        name: The name of the checkpoint.
        target: The folder to make.

    Returns:
        Whether it is of this kind.

    Raises:
        CorruptCheckpointError: Its list of files is damaged.
    """
    start = f"{name}/" if name else ""
    target.mkdir(parents=True, exist_ok=True)
    try:
        get(f"{start}{STATES}", target / STATES)
    except (FileNotFoundError, NotADirectoryError):
        target.rmdir()
        return False
    for file in _states(target)["sha256"]:
        if Path(file).name != file:
            raise CorruptCheckpointError(target, f"it names a file outside of its folder, {file!r}")
        get(f"{start}{file}", target / file)
    return True


def _taken_out(value: Any, path: str, shards: dict[str, Any]) -> Any:
    """The structure without its divided tensors, which are put into `shards` by their paths."""
    if is_sharded(value):
        shards[path] = value.detach()
        return {_SHARD: path, "shape": tuple(value.shape), "dtype": value.dtype}
    if isinstance(value, dict):
        return map_items(value, lambda key, item: _taken_out(item, f"{path}/{key}".lstrip("/"), shards))
    if type(value) in (list, tuple):
        return type(value)(_taken_out(v, f"{path}/{i}", shards) for i, v in enumerate(value))
    return value


def _put_back(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        if _SHARD in value:
            return Shard(value[_SHARD], torch.Size(value["shape"]), value["dtype"], folder)
        return map_items(value, lambda _, item: _put_back(item, folder))
    if type(value) in (list, tuple):
        return type(value)(_put_back(v, folder) for v in value)
    return value


def _with_targets(
    value: Any, parameters: Mapping[str, torch.Tensor], like: Any, targets: dict[Path, dict[str, torch.Tensor]]
) -> Any:
    if isinstance(value, Shard):
        if like is not None and like.shape == value.shape:
            target = torch.empty_like(like.detach(), dtype=value.dtype)
        else:
            target = torch.empty(value.shape, dtype=value.dtype)
        targets.setdefault(value.folder, {})[value.name] = target
        return target
    if isinstance(value, dict):
        return map_items(value, lambda key, v: _with_targets(v, parameters, parameters.get(key, like), targets))
    if type(value) in (list, tuple):
        return type(value)(_with_targets(v, parameters, like, targets) for v in value)
    return value


def _check_shapes(content: Any, shapes: dict[Path, dict[str, tuple[int, ...] | None]]) -> None:
    """Check the shapes before memory is taken for them; `shapes` are those of the folders that were read."""
    if isinstance(content, Shard):
        if content.folder not in shapes:
            shapes[content.folder] = shapes_of_shards(content.folder)
        if content.name not in shapes[content.folder]:
            raise CorruptCheckpointError(content.folder, f"its shards lack {content.name!r}")
        found, shape = shapes[content.folder][content.name], tuple(content.shape)
        if found is not None and found != shape:
            raise CorruptCheckpointError(
                content.folder, f"{content.name!r} has the shape {found} in its index, but {shape} in {STATES!r}"
            )
    elif isinstance(content, (dict, list, tuple)):
        for value in content.values() if isinstance(content, dict) else content:
            _check_shapes(value, shapes)


def _states(folder: Path) -> dict[str, Any]:
    states = read_file(folder / STATES)[0]
    kinds = {"content": dict, "folder": str, "sha256": dict}
    if not isinstance(states, dict) or any(not isinstance(states.get(key), kind) for key, kind in kinds.items()):
        raise CorruptCheckpointError(folder, f"its file {STATES!r} is not that of a checkpoint in shards")
    return states


def _others(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != STATES)


def _check_all_there(folder: Path, world_size: int) -> None:
    writers = {name.split("_")[2] for name in _others(folder) if name.endswith(".distcp")}
    if len(writers) < world_size:
        raise RuntimeError(
            f"{str(folder.parent)!r} must be on a disk that all ranks share to save in shards, but rank 0 finds the "
            f"shards of {len(writers)} of {world_size} ranks there. Use another `save_folder`, or "
            f"`state_dict_type='full'`."
        )


def _check_digests(folder: Path, digests: Mapping[str, str], names: Any) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise CorruptCheckpointError(folder, f"its file {name!r} is missing")
        if _digest(folder / name) != digests[name]:
            raise CorruptCheckpointError(folder, f"the checksum of its file {name!r} does not match its content")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
