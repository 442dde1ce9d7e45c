"""Checkpoints in shards, as `torch.distributed.checkpoint` writes and reads them: one folder, written by all ranks."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from composer.checkpoint._durable import sync_folder, temporary_path
from composer.checkpoint._pickle_checks import UnsafeCheckpointError, check_pickle, check_torch_file, refuse
from composer.checkpoint._ranks import on_first_rank
from composer.checkpoint._safe_load import load_plain
from composer.checkpoint._seal import CorruptCheckpointError
from composer.utils import dist

__all__ = ["is_shard_folder", "names_of_shards", "read_shards", "shapes_of_shards", "write_shards"]

_INDEX = ".metadata"  # torch writes it last
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_TYPES = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


def is_shard_folder(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in shards."""
    return (folder / _INDEX).is_file()


def write_shards(
    state_dict: dict[str, Any], folder: Path, overwrite: bool, finish: Callable[[Path], None] | None = None
) -> None:
    """Write a checkpoint in shards: whole, or not at all. A collective operation.

    Args:
        state_dict: Each rank's part.
        folder: The folder to make.
        overwrite: Whether an existing one is replaced.
        finish: Completes the folder under its temporary name, on rank 0, when all ranks have written.

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
    try:
        with _without_noise():
            save(state_dict, checkpoint_id=temporary)
    except CheckpointException as error:  # no Exception
        causes = [failure for failure, _ in error.failures.values()]
        number = next((cause.errno for cause in causes if isinstance(cause, OSError)), None) or errno.EIO
        reasons = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
        text = f"Could not save {str(folder)!r}: {reasons}. Checkpoints saved earlier are untouched"
        _remove(temporary)
        raise OSError(number, f"{text}. Free some space, or save elsewhere") from error
    try:
        on_first_rank(lambda: _finish(temporary, folder, finish))
    finally:
        _remove(temporary)


def _remove(temporary: Path) -> None:
    if dist.get_global_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)


def names_of_shards(folder: Path) -> set[str]:
    """The names of what a checkpoint in shards has."""
    return {*_reader(folder).read_metadata().state_dict_metadata}


def shapes_of_shards(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """The shape of each tensor of a checkpoint in shards by its name; None of what is no tensor."""
    index = _reader(folder).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in index.items()}


def read_shards(state_dict: dict[str, Any], folder: Path, planner: Any = None) -> None:
    """Fill tensors with what a checkpoint in shards has under their names. A collective operation.

    Args:
        state_dict: What to fill.
        folder: The folder.
        planner: A planner of torch that maps names and tensors; None: one that runs no code from the files.

    Raises:
        CorruptCheckpointError: The folder's index or a file of it is missing or damaged.
        UnsafeCheckpointError: It holds types whose loading could run code.
        RuntimeError: The checkpoint has no such names, or tensors of other shapes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    if not is_shard_folder(folder):
        raise CorruptCheckpointError(folder, f"it lacks the index {_INDEX!r}, which is written last")
    reader = _reader(folder)
    try:
        with _without_noise():
            load(state_dict, storage_reader=reader, planner=_planner() if planner is None else planner)
    except CheckpointException as error:  # no Exception, but told as one
        for _, (failure, _) in sorted(error.failures.items()):
            if isinstance(failure, (UnsafeCheckpointError, CorruptCheckpointError)):
                raise failure from None
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise RuntimeError(f"The shards in {str(folder)!r} could not be loaded: {causes}") from error


def _finish(temporary: Path, folder: Path, finish: Callable[[Path], None] | None) -> None:
    if finish is not None:
        finish(temporary)
    sync_folder(temporary)
    replaced = temporary_path(folder)
    if folder.exists():
        os.replace(folder, replaced)  # folders do not take each other's place
    os.replace(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _reader(folder: Path) -> Any:
    """Torch's reader of a folder, but one that checks the index and each entry first."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = read_index(folder / _INDEX)  # here, as torch hides the errors of `read_metadata`

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                info = self.storage_data[item.storage_index]
                path = folder / info.relative_path
                with open(path, "rb") as file:
                    part = cast(IO[bytes], _Part(file, info.offset, info.length))
                    check_torch_file(part, f"{path}, entry {item.storage_index.fqn}")
            return super().read_data(plan, planner)

    return Reader(folder)


class _Part(io.RawIOBase):
    """A part of a file, as a file. Torch's own does not seek from the end as files do."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise ValueError(f"negative position {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        read: int = self._file.readinto(memoryview(buffer)[:count])
        self._at += read
        return read


def _planner() -> Any:
    """Torch's planner, but one that reads what is no tensor, a pickle, without running code."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            plain = io.BytesIO()
            torch.save(load_plain(value, f"the entry {read_item.dest_index.fqn!r} of the shards"), plain)
            plain.seek(0)
            super().load_bytes(read_item, plain)  # which would load the original without asking

    return Planner()


def read_index(path: Path) -> Any:
    """The index of a checkpoint in shards.

    Raises:
        UnsafeCheckpointError: It holds types that an index does not have.
        CorruptCheckpointError: It is damaged.
    """
    data = path.read_bytes()
    check_pickle(data, str(path))
    try:
        metadata = _IndexUnpickler(io.BytesIO(data), path).load()
        _check_index(metadata, path)
    except (UnsafeCheckpointError, CorruptCheckpointError):
        raise
    except Exception as error:  # damaged and hostile pickles fail in many ways
        raise CorruptCheckpointError(path, f"it cannot be read ({error})") from error
    from torch.distributed.checkpoint.metadata import StorageMeta

    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _check_index(metadata: Any, path: Path) -> None:
    """Check that an index is of its folder: that what it tells of is in the files, and no larger than they are."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if Path(name).name != name or name == "..":
            raise CorruptCheckpointError(path, f"it names a file outside of the folder, {name!r}")
        if name not in sizes:
            if not (path.parent / name).is_file():
                raise CorruptCheckpointError(path, f"the file {name!r}, which it names, is missing")
            sizes[name] = (path.parent / name).stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise CorruptCheckpointError(path, f"the entry {index.fqn!r} is not within {name!r}")
        if getattr(info, "transform_descriptors", None):
            raise refuse(str(path), f"the entry {index.fqn!r}, which is transformed")
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        values = 0
        for chunk in tensor.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            extents = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            if not all(0 <= offset <= offset + size <= whole for offset, size, whole in extents):
                raise CorruptCheckpointError(path, f"a part of {name!r} is not within its shape")
            values += math.prod(chunk.sizes)
            if math.prod(chunk.sizes) * tensor.properties.dtype.itemsize > info.length:
                raise CorruptCheckpointError(path, f"a part of {name!r} is larger than its {info.length} bytes")
        if values != math.prod(tensor.size):
            raise CorruptCheckpointError(path, f"the parts of {name!r} are not the whole of it")


class _IndexUnpickler(pickle.Unpickler):
    """Makes the types of an index only."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _INDEX_TYPES and not (module == "torch" and _is_constant(name)):
            raise UnsafeCheckpointError(
                f"The index {str(self._path)!r} holds `{module}.{name}`, which is not part of an index, and loading it "
                f"could run code. Nothing was loaded."
            )
        return super().find_class(module, name)


def _is_constant(name: str) -> bool:
    return isinstance(getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format))


@contextmanager
def _without_noise() -> Iterator[None]:
    """A single process is meant; torch takes it for a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (unavailable|disabled)", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
