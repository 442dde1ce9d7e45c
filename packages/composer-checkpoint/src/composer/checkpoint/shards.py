"""Checkpoints in shards: a folder that all ranks write together.

`write_shards` and `read_shards` use the format of `torch.distributed.checkpoint`. The checkpoint of a run adds one
file for everything that is not sharded among ranks::

    ep1-ba100/__0_0.distcp        the shards that rank 0 wrote
              __1_0.distcp        and so on
              .metadata           their index
              composer_states.pt  everything else, with its checksum; it holds the SHA-256 of all other files

All ranks write the folder under a temporary name. It is renamed when all of it is on the disk.

Folders that MosaicML's Composer wrote have no `composer_states.pt`: all values are entries of the index, and there are
no checksums. They are read, too.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from composer.checkpoint.download import linked_uris
from composer.checkpoint.durable import sync_folder, temporary_path
from composer.checkpoint.file import STATES, read_file, read_outline, sha256_of, write_file
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.safe_load import CorruptCheckpointError, UnsafeCheckpointError, load_plain
from composer.checkpoint.sharded_tensors import is_sharded, map_items, map_nested, parameter_of
from composer.checkpoint.storage import Storage, StorageError, storage_of
from composer.core import Timestamp
from composer.utils import dist

log = logging.getLogger(__name__)

_SHARD = "__shard__"

INDEX = ".metadata"  # torch writes it last
_TYPES_OF_INDEX = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "collections": "OrderedDict",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath Path",
    "pathlib._local": "PosixPath WindowsPath",
}
_INDEX_TYPES = {(module, name) for module, names in _TYPES_OF_INDEX.items() for name in names.split()}


def is_shard_folder(folder: Path) -> bool:
    """Return True if a folder holds a checkpoint in shards."""
    return (folder / INDEX).is_file()


def write_shards(
    state_dict: dict[str, Any], folder: Path, overwrite: bool, finish: Callable[[Path], None] | None = None
) -> None:
    """Write a checkpoint in shards atomically. A collective operation.

    Args:
        state_dict: This rank's part.
        folder: The folder to create.
        overwrite: Replace an existing one.
        finish: Called on rank 0 with the temporary folder when all ranks have written, to complete it.

    Raises:
        FileExistsError: The folder exists, and `overwrite` is False.
        OSError: It cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    def check() -> None:
        if folder.exists() and not overwrite:
            raise FileExistsError(f"{str(folder)!r} already exists. Pass `overwrite=True` to replace it.")
        folder.parent.mkdir(parents=True, exist_ok=True)

    on_first_rank(check)
    temporary = Path(dist.all_gather_object(str(temporary_path(folder)))[0])

    def publish() -> None:
        if finish is not None:
            finish(temporary)
        sync_folder(temporary)
        replaced = temporary_path(folder)
        if folder.exists():
            os.replace(folder, replaced)  # a folder cannot replace another one
        os.replace(temporary, folder)
        sync_folder(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        with _without_noise():
            save(state_dict, checkpoint_id=temporary)
        on_first_rank(publish)
    except CheckpointException as error:  # not a subclass of Exception
        causes = [failure for failure, _ in error.failures.values()]
        number = next((cause.errno for cause in causes if isinstance(cause, OSError)), None) or errno.EIO
        reasons = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
        text = f"Could not save {str(folder)!r}: {reasons}. Checkpoints saved earlier are unchanged"
        raise OSError(number, f"{text}. Free some space, or save elsewhere") from error
    finally:
        if dist.get_global_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def read_shards(state_dict: dict[str, Any], folder: Path, planner: Any = None) -> None:
    """Fill tensors from the entries of the same names of a checkpoint in shards. A collective operation.

    Args:
        state_dict: The tensors to fill.
        folder: The folder.
        planner: A planner of torch that maps names and tensors; None: one that runs no code from the files.

    Raises:
        CorruptCheckpointError: The folder's index or a file of it is missing or damaged.
        UnsafeCheckpointError: It holds types whose loading could run code.
        RuntimeError: The checkpoint has no such names, or tensors of other shapes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not is_shard_folder(folder):
        raise CorruptCheckpointError(folder, f"it lacks the index {INDEX!r}, which is written last")
    metadata = read_index(folder / INDEX)  # here, because torch hides the errors of `read_metadata`

    class Reader(FileSystemReader):
        """Reader of torch that takes the index without unpickling it, which would run code."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(DefaultLoadPlanner):
        """Planner of torch that reads entries other than tensors, which are pickles, without running code."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            plain = io.BytesIO()
            torch.save(load_plain(value, f"the entry {read_item.dest_index.fqn!r} of the shards"), plain)
            plain.seek(0)
            super().load_bytes(read_item, plain)  # torch's method loads the bytes without checks

    try:
        with _without_noise():
            load(state_dict, storage_reader=Reader(folder), planner=Planner() if planner is None else planner)
    except CheckpointException as error:  # not a subclass of Exception
        failures = [failure for _, (failure, _) in sorted(error.failures.items())]
        for failure in failures:
            if isinstance(failure, (UnsafeCheckpointError, CorruptCheckpointError)):
                raise failure from None
            if isinstance(failure, pickle.UnpicklingError):  # torch's own, for an entry in the place of a tensor
                raise UnsafeCheckpointError(
                    f"The shards in {str(folder)!r} hold something else in the place of a tensor, whose loading could "
                    f"run code, so nothing was loaded: {failure}"
                ) from None
        raise RuntimeError(f"The shards in {str(folder)!r} could not be loaded: {failures}") from error


def read_index(path: Path, complete: bool = True) -> Any:
    """Read the index of a checkpoint in shards.

    Args:
        path: The index.
        complete: Check that the files beside it have all entries.

    Raises:
        UnsafeCheckpointError: It holds types that an index does not have.
        CorruptCheckpointError: It is damaged.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    data = path.read_bytes()
    try:
        metadata = _IndexUnpickler(io.BytesIO(data), path).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {type(metadata).__name__}")
        if complete:
            _check_index(metadata, path)
    except (UnsafeCheckpointError, CorruptCheckpointError):
        raise
    except Exception as error:  # damaged and hostile pickles fail in many ways
        raise CorruptCheckpointError(path, f"its pickle cannot be read ({error!r})") from error
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _check_index(metadata: Any, path: Path) -> None:
    """Check that the files that an index names are there, and complete."""
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name not in sizes:
            if not (path.parent / name).is_file():
                raise CorruptCheckpointError(path, f"the file {name!r}, which it names, is missing")
            sizes[name] = (path.parent / name).stat().st_size
        if info.offset + info.length > sizes[name]:
            raise CorruptCheckpointError(path, f"the entry {index.fqn!r} is not within {name!r}")


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of the types of an index only."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        constant = isinstance(getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format))
        if (module, name) not in _INDEX_TYPES and not (module == "torch" and constant):
            raise UnsafeCheckpointError(
                f"The index {str(self._path)!r} holds `{module}.{name}`, which does not belong in an index, and "
                f"loading it could run code. Nothing was loaded."
            )
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """Return the member of an enum. Python 3.11.0 to 3.11.3 pickle it as `getattr(kind, name)`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise UnsafeCheckpointError(
            f"The index holds `getattr({kind!r}, {name!r})`, which does not belong in an index, and loading it could "
            f"run code. Nothing was loaded."
        )
    return kind[name]


@contextmanager
def _without_noise() -> Iterator[None]:
    """Silence torch's warnings: running in a single process is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (unavailable|disabled)", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield


@dataclass
class Shard:
    """Placeholder for a tensor that is in the shards.

    Attributes:
        name: Its name there.
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        folder: The checkpoint.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    folder: Path


def is_sharded_run(path: str | Path) -> bool:
    """Return True if a path is the checkpoint of a run in shards.

    Raises:
        CorruptCheckpointError: Its index is damaged.
        UnsafeCheckpointError: Its index holds types that an index does not have.
    """
    return (Path(path) / STATES).is_file() or _is_indexed(Path(path))


def _is_indexed(folder: Path) -> bool:
    """Return True for a checkpoint that MosaicML's Composer wrote."""
    return not (folder / STATES).is_file() and is_shard_folder(folder) and _has_run(read_index(folder / INDEX))


def _has_run(metadata: Any) -> bool:
    return any(path[0] == "state" and len(path) > 1 for path in (metadata.planner_data or {}).values())


def _read_indexed(folder: Path, *within: str) -> Any:
    """Read a checkpoint that MosaicML's Composer wrote, with `Shard` placeholders for its tensors.

    Args:
        folder: The folder.
        *within: The keys that lead to the requested part; none: all of it.

    Raises:
        CorruptCheckpointError: The index or an entry is damaged.
        UnsafeCheckpointError: An entry holds types whose loading could run code.
        KeyError: There is no such part.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata = read_index(folder / INDEX)
    content: dict[Any, Any] = {}
    for name, path in metadata.planner_data.items():
        if path[: len(within)] != within:
            continue
        entry = metadata.state_dict_metadata[name]
        if hasattr(entry, "size"):
            value: Any = Shard(name, entry.size, entry.properties.dtype, folder)
        else:
            stored = metadata.storage_data[MetadataIndex(name)]
            with open(folder / stored.relative_path, "rb") as file:
                file.seek(stored.offset)
                data = io.BytesIO(file.read(stored.length))
            value = load_plain(data, f"the entry {name!r} of {str(folder)!r}")
        inside = content
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = value
    found = _with_lists(content)
    for key in within:
        found = found[key]
    return found


def _with_lists(value: Any) -> Any:
    """Copy a nested structure with lists for dicts of positions."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[key] for key in sorted(items)] if any(type(key) is int for key in items) else items


def write_run(content: dict[str, Any], folder: Path, overwrite: bool) -> None:
    """Write the checkpoint of a run in shards atomically. A collective operation.

    Args:
        content: The content, on each rank with its parts of the sharded tensors.
        folder: The folder to create, on a disk that all ranks share.
        overwrite: Replace an existing one.

    Raises:
        FileExistsError: The folder exists, and `overwrite` is False.
        OSError: It cannot be written.
        RuntimeError: Another rank failed, or ranks write to different disks.
    """
    shards: dict[str, Any] = {}

    def take_out(path: tuple[Any, ...], value: Any) -> Any:
        if not is_sharded(value):
            return value
        name = "/".join(map(str, path))
        shards[name] = value.detach()
        return {_SHARD: name, "shape": tuple(value.shape), "dtype": value.dtype}

    rest = map_nested(content, take_out)

    def finish(temporary: Path) -> None:
        digests = {name: sha256_of(temporary / name) for name in _others(temporary)}
        writers = {name.split("_")[2] for name in digests if name.endswith(".distcp")}
        if shards and len(writers) < dist.get_world_size():
            raise RuntimeError(
                f"{str(folder.parent)!r} must be on a disk that all ranks share to save in shards, but rank 0 finds "
                f"the shards of {len(writers)} of {dist.get_world_size()} ranks there. Use another `save_folder`, or "
                f"`state_dict_type='full'`."
            )
        write_file({"content": rest, "sha256": digests}, temporary / STATES)

    write_shards(shards, folder, overwrite, finish)


def remove_run(path: Path) -> None:
    """Remove a checkpoint, in one file or in shards. If interrupted, the rest is not a valid checkpoint."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    (path / STATES).unlink(missing_ok=True)
    shutil.rmtree(path)


def check_run(folder: Path) -> None:
    """Check a checkpoint in shards without loading it.

    Raises:
        CorruptCheckpointError: A file of it is missing, incomplete or modified.
    """
    if not _is_indexed(folder):  # otherwise, `_is_indexed` has checked the index and the sizes of the files
        states = _states(folder)  # `_states` checks the checksum of its own file
        _check_digests(folder, states["sha256"], states["sha256"])


def read_run(folder: Path) -> Any:
    """Check a checkpoint, and load it with `Shard` placeholders for its shards. A collective operation.

    Each rank checks a part of the files.

    Raises:
        CorruptCheckpointError: A file of it is missing, incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
    """
    if _is_indexed(folder):
        return _read_indexed(folder)
    states = _states(folder)
    names = sorted(states["sha256"])
    problem: CorruptCheckpointError | None = None
    try:
        _check_digests(folder, states["sha256"], names[dist.get_global_rank() :: dist.get_world_size()])
    except CorruptCheckpointError as error:
        problem = error
    for reason in dist.all_gather_object(None if problem is None else problem.reason):
        if reason is not None:
            raise CorruptCheckpointError(folder, reason)
    return _with_shards(states["content"], folder)


def outline_of_run(path: Path) -> Any:
    """Return the plain values of a checkpoint, in one file or in shards, without running code; None for any other file.

    Only the beginning of the file is read, so the rest may be missing.
    """
    if _is_indexed(path):
        return {"state": {key: _read_indexed(path, "state", key) for key in ("run_name", "timestamp")}}
    file = path / STATES if is_sharded_run(path) else path
    content = read_outline(file)
    return content.get("content") if file.name == STATES and isinstance(content, dict) else content


def identify_run(path: Path) -> tuple[str, Timestamp] | None:
    """Return the name of the run that saved a checkpoint, and the training time; None if they are not recorded.

    Damaged files and files of other programs are not errors; see `outline_of_run`.
    """
    with suppress(LookupError, TypeError, ValueError, AttributeError, StopIteration):
        state, timestamp = outline_of_run(path)["state"], Timestamp()
        timestamp.load_state_dict(next(iter(state["timestamp"].values())))
        return state["run_name"], timestamp
    return None


def fill_shards(content: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Read the shards: this rank's part of tensors that belong to a sharded parameter, other tensors whole.

    A collective operation.

    Args:
        content: The content that `read_run` returned, or a part of it.
        parameters: The sharded parameters by name.

    Returns:
        The content with tensors.
    """
    targets: dict[str, torch.Tensor] = {}
    folders: set[Path] = set()

    def target_of(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, Shard):
            return value
        like = parameter_of(path, parameters)
        if like is not None and like.shape == value.shape:
            target = torch.empty_like(like.detach(), dtype=value.dtype)
        else:
            target = torch.empty(value.shape, dtype=value.dtype)
        targets[value.name] = target
        folders.add(value.folder)
        return target

    filled = map_nested(content, target_of)
    for folder in folders:  # one, or none if nothing is sharded
        read_shards(dict(targets), folder)
    return filled


def files_of_run(path: Path, name: str) -> list[tuple[Path, str]]:
    """List the files of a checkpoint, in one file or in shards, with their names in a store; the index comes last."""
    if not is_sharded_run(path):
        return [(path, name)]
    last = INDEX if _is_indexed(path) else STATES
    return [(path / file, f"{name}/{file}") for file in (*_others(path, last), last)]


def download_run(uri: str, target: Path, progress_bar: bool) -> bool:
    """Download a checkpoint in shards, or the one that a link names.

    Args:
        uri: Its URI.
        target: The folder to create.
        progress_bar: Show the progress.

    Returns:
        True if there is such a checkpoint.
    """
    if uri.partition(":")[0] in ("http", "https"):  # they have no folders
        return False
    store: Storage | None = None
    try:
        stores = map(storage_of, (uri, *linked_uris(uri)))
        store = next((store for store in stores if store.exists(STATES) or store.exists(INDEX)), None)
    except StorageError as error:  # reading may be allowed, but not listing
        log.debug("Could not check whether %s is in shards: %s", uri, error)
    if store is None:
        return False
    return fetch_run(lambda name, path: store.download(name, path, progress=progress_bar), "", target)


def fetch_run(get: Callable[[str, Path], None], name: str, target: Path) -> bool:
    """Fetch a checkpoint in shards, file by file.

    Args:
        get: Fetches a file by name to a path.
        name: The name of the checkpoint.
        target: The folder to create.

    Returns:
        True if it is in shards.

    Raises:
        CorruptCheckpointError: Its list of files is damaged.
        UnsafeCheckpointError: Its list of files holds other types.
    """
    start = f"{name}/" if name else ""
    target.mkdir(parents=True, exist_ok=True)
    files: list[str] | None = None
    for listing in (STATES, INDEX):
        try:
            get(f"{start}{listing}", target / listing)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if listing == STATES:
            files = list(_states(target)["sha256"])
        elif _has_run(metadata := read_index(target / INDEX, complete=False)):
            files = sorted({info.relative_path for info in metadata.storage_data.values()})
        break
    if files is None:
        (target / INDEX).unlink(missing_ok=True)
        target.rmdir()
        return False
    for file in files:
        if Path(file).name != file:
            raise CorruptCheckpointError(target, f"it names a file outside of its folder, {file!r}")
        get(f"{start}{file}", target / file)
    return True


def _with_shards(value: Any, folder: Path) -> Any:
    """Copy what `write_run` wrote with a `Shard` for each tensor that is in the shards."""
    if isinstance(value, dict) and _SHARD in value:
        return Shard(value[_SHARD], torch.Size(value["shape"]), value["dtype"], folder)
    if isinstance(value, dict):
        return map_items(value, lambda _, item: _with_shards(item, folder))
    if type(value) in (list, tuple):
        return type(value)(_with_shards(item, folder) for item in value)
    return value


def _states(folder: Path) -> dict[str, Any]:
    states = read_file(folder / STATES)
    if not isinstance(states, dict) or any(not isinstance(states.get(key), dict) for key in ("content", "sha256")):
        raise CorruptCheckpointError(folder, f"its file {STATES!r} does not belong to a checkpoint in shards")
    return states


def _others(folder: Path, last: str = STATES) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != last)


def _check_digests(folder: Path, digests: Mapping[str, str], names: Any) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise CorruptCheckpointError(folder, f"its file {name!r} is missing")
        if sha256_of(folder / name) != digests[name]:
            raise CorruptCheckpointError(folder, f"the checksum of its file {name!r} does not match its content")
