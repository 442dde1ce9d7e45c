"""One checkpoint file: as torch writes it, in a tar archive, or compressed."""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from composer.checkpoint.checksum import CorruptCheckpointError, append_checksum, read_saved_name, verify, write_all
from composer.checkpoint.durable import atomic_write, scratch_folder, sync_file, temporary_path
from composer.checkpoint.names import check_file_name
from composer.checkpoint.safe_load import PlainPickler, UnsafeCheckpointError, read_plain_values, safe_torch_load
from composer.checkpoint.safetensors import read_tensors
from composer.utils.compression import get_compressor, is_compressed_pt, is_tar

STATES = "composer_states.pt"
"""The file with the states in a checkpoint that is an archive or a folder of shards."""
_PLAIN = SimpleNamespace(__name__="pickle", Pickler=PlainPickler)
_TAR_MODES = {"tar": "w", "tgz": "w:gz", "gz": "w:gz", "bz2": "w:bz2", "lzma": "w:xz"}


def write_file(
    content: dict[str, Any], path: str | os.PathLike[str], on_pickled: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint atomically, with a checksum: it is complete and on the disk, or not there at all.

    Args:
        content: Anything that `torch.save` can save.
        path: The file. Its extension is its format: `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2` and `.tar.lzma` are archives
            of one member, `.pt.gz` and the like are compressed, and all others are as torch writes them.
        on_pickled: Called when everything but the tensors' bytes is pickled, possibly several times.

    Raises:
        OSError: It cannot be written; an earlier file of this name is unchanged.
    """
    target = Path(path)
    check_file_name(target.name)
    if not (is_tar(target) or is_compressed_pt(target.name)):
        with atomic_write(target) as temporary:
            _save(content, temporary, target.name, on_pickled)
        return
    with atomic_write(target) as temporary, ExitStack() as stack:
        inner = temporary_path(target.parent / STATES)  # on the disk that must have enough space anyway
        stack.callback(inner.unlink, missing_ok=True)
        _save(content, inner, target.name, on_pickled)
        if is_tar(target):
            with tarfile.open(temporary, _TAR_MODES[target.suffix[1:]]) as archive:  # type: ignore[call-overload]
                archive.add(inner, STATES)
        else:
            with get_compressor(target.name).compress(str(temporary)) as stream, open(inner, "rb") as source:
                shutil.copyfileobj(source, stream)
        sync_file(temporary)


def read_file(path: str | os.PathLike[str]) -> tuple[Any, str | None]:
    """Check and load a checkpoint onto the CPU, running no code from it.

    Args:
        path: A file that `write_file` or the reference's trainer wrote; or weights in a `.safetensors` file, which are
            returned as a checkpoint that holds nothing but the model.

    Returns:
        Its content, and the file name under which it was saved (None if it is not recorded).

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
    """
    file = Path(path).expanduser()
    if file.suffix == ".safetensors":
        return {"state": {"model": read_tensors(file)[0]}}, None
    with _unpacked(file) as plain:
        return safe_torch_load(plain), read_saved_name(plain)


def check_file(path: str | os.PathLike[str]) -> str | None:
    """Check a checkpoint without loading it.

    Returns:
        The file name under which it was saved (None if it is not recorded).

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
    """
    with _unpacked(Path(path).expanduser()) as plain:
        return verify(plain)


def read_outline(path: Path) -> Any:
    """Read the plain values of a checkpoint, such as names and counts, without its tensors, running no code from it.

    Only the beginning of the file is read, so that the rest may be missing.

    Args:
        path: The file.

    Returns:
        The content with placeholders for tensors and other objects; None for any other file.
    """
    if not path.is_file():
        return None
    with suppress(Exception), _stream(path) as stream:  # any other file, a damaged one, or an end that is cut off
        header = _read_exactly(stream, 30)  # of the archive's first part, as the specification of zip has it
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        name = _read_exactly(stream, name_length)
        _read_exactly(stream, extra_length)
        if header.startswith(b"PK\x03\x04") and name.endswith(b"/data.pkl"):
            return read_plain_values(stream)
    return None


@contextmanager
def _stream(path: Path) -> Iterator[IO[bytes]]:
    """Open a checkpoint as torch wrote it, from its beginning."""
    with ExitStack() as opened:
        if is_tar(path.name):
            archive = opened.enter_context(tarfile.open(path, "r|*"))
            first = archive.next()
            member = None if first is None else archive.extractfile(first)
            if member is None:
                raise CorruptCheckpointError(path, "its first member is not a file")
            yield opened.enter_context(member)
        elif is_compressed_pt(path.name):
            yield opened.enter_context(get_compressor(path.name).decompress(str(path)))
        else:
            yield opened.enter_context(open(path, "rb"))


def _read_exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _save(content: dict[str, Any], path: Path, name: str, on_pickled: Callable[[], None]) -> None:
    """Save with torch, and append the checksum."""
    has_crc = bool(torch.serialization.get_crc32_options())  # torch may be told to compute none
    with open(path, "wb", buffering=0) as file:
        torch.save(content, _NotifyingFile(file, on_pickled), pickle_module=_PLAIN)  # type: ignore[arg-type]
    append_checksum(path, name, has_crc)


class _NotifyingFile:
    """File for `torch.save`, which pickles before its first write, and writes the tensors' bytes afterwards."""

    def __init__(self, file: FileIO, on_pickled: Callable[[], None]) -> None:
        self._file, self._describe = file, on_pickled

    def write(self, data: memoryview | bytes) -> int:
        self._describe()
        write_all(self._file, data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yield the file as torch wrote it, unpacked from its archive if it is in one."""
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}.")
    name = path.resolve().name  # a link may have another extension
    if not (is_tar(name) or is_compressed_pt(name)):
        yield path
        return
    with scratch_folder("unpacked") as folder:
        plain = folder / STATES
        _unpack(path, name, plain)
        try:
            yield plain
        except CorruptCheckpointError as error:  # the message names the archive
            raise CorruptCheckpointError(path, error.reason) from error
        except UnsafeCheckpointError as error:
            raise UnsafeCheckpointError(str(error).replace(str(plain), str(path))) from error


def _unpack(path: Path, name: str, plain: Path) -> None:
    try:
        if is_tar(name):
            with tarfile.open(path) as archive:
                member = archive.extractfile(STATES)
                if member is None:
                    raise CorruptCheckpointError(path, f"its member {STATES!r} is not a file")
                with member, open(plain, "wb") as target:
                    shutil.copyfileobj(member, target)
        else:
            with get_compressor(name).decompress(str(path)) as stream, open(plain, "wb") as target:
                shutil.copyfileobj(stream, target)
    except (tarfile.TarError, zlib.error, lzma.LZMAError, KeyError, EOFError, OSError, RecursionError) as error:
        if getattr(error, "errno", None) is not None:  # the system's error, not the archive's
            raise
        raise CorruptCheckpointError(path, f"it cannot be unpacked ({error})") from error
