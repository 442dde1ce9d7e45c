"""One checkpoint file: as torch writes it, in a tar archive, or compressed. It ends with a checksum.

`torch.save` writes a zip archive of parts: one for the bytes of each tensor, one for the pickle, and some small ones.
For each part the archive's directory has a CRC-32, which torch computes while it writes. The archive ends with a
comment, which `torch.load` and unzip skip. The comment is

    composer-checkpoint-2 {"file": "ep1.pt"} <SHA-256 in hexadecimal digits>

with the name under which the file was saved. The SHA-256 covers all bytes outside of the parts, from the beginning of
the file to the digest itself: headers, padding, the directory with its CRC-32s, and the comment. So the parts, which
are nearly all of the file, are hashed only once, while they are written. A CRC-32 detects every change within 32
successive bits, and misses one of 4 billion other changes.

A file is never mapped into memory (`mmap=True` of `torch.load`): bytes could change after they were checked, and if
another program wrote to the file or truncated it in place, the process would read other values or die of SIGBUS.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from composer.checkpoint.durable import atomic_write, scratch_folder, sync_file, temporary_path
from composer.checkpoint.names import check_file_name, check_nonempty_path
from composer.checkpoint.safe_load import (
    CorruptCheckpointError,
    OutlineUnpickler,
    Part,
    PlainPickler,
    UnsafeCheckpointError,
    load_plain,
    parts_of_archive,
)
from composer.checkpoint.safetensors import read_tensors
from composer.utils import dist
from composer.utils.compression import get_compressor, is_compressed_pt, is_tar

try:
    from isal.isal_zlib import crc32  # several times as fast as zlib's: memory is the limit
except ImportError:  # there are no wheels for every platform
    from zlib import crc32

STATES = "composer_states.pt"
"""The file with the states in a checkpoint that is an archive or a folder of shards."""
_TAR_MODES = {"tar": "w", "tgz": "w:gz", "gz": "w:gz", "bz2": "w:bz2", "lzma": "w:xz"}
_MAGIC = b"composer-checkpoint-2 "
_DIGEST_LENGTH = 64  # hexadecimal digits of a SHA-256
_COMMENT_LENGTH = 2  # bytes of the last field of a zip archive, the length of its comment
_BLOCK = 1 << 20


def write_file(
    content: dict[str, Any], path: str | os.PathLike[str], on_pickled: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint atomically, with a checksum: it is complete and on the disk, or not there at all.

    Args:
        content: Anything that `torch.save` can save.
        path: The file. Its extension is its format: `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2` and `.tar.lzma` are archives
            of one member, `.pt.gz` and the like are compressed, and all others are as torch writes them.
        on_pickled: Called when everything but the tensors' bytes is pickled.

    Raises:
        OSError: It cannot be written; an earlier file of this name is unchanged.
        RuntimeError: torch was told to compute no CRC-32.
    """
    if not torch.serialization.get_crc32_options():
        raise RuntimeError("Checkpoints need torch's CRC-32: call `torch.serialization.set_crc32_options(True)`.")

    class NotifyingPickler(PlainPickler):
        def dump(self, value: Any) -> None:
            super().dump(value)
            on_pickled()

    target = Path(path)
    check_file_name(target.name)
    is_archive = is_tar(target)
    is_packed = is_archive or is_compressed_pt(target.name)
    with atomic_write(target) as temporary, ExitStack() as stack:
        plain = temporary
        if is_packed:
            plain = temporary_path(target)  # next to the target, because that disk needs the space anyway
            stack.callback(plain.unlink, missing_ok=True)
        pickler: Any = SimpleNamespace(__name__="pickle", Pickler=NotifyingPickler)
        with open(plain, "wb") as file:
            torch.save(content, file, pickle_module=pickler)
        append_checksum(plain, target.name)
        if is_archive:
            with tarfile.open(temporary, _TAR_MODES[target.suffix[1:]]) as archive:  # type: ignore[call-overload]
                archive.add(plain, STATES)
        elif is_packed:
            with get_compressor(target.name).compress(str(temporary)) as stream, open(plain, "rb") as source:
                shutil.copyfileobj(source, stream)
        if is_packed:
            sync_file(temporary)


def append_checksum(path: Path, name: str) -> None:
    """Append the checksum to a zip archive without a comment, and flush the file to the disk.

    Args:
        path: The archive.
        name: The file name under which it is saved.
    """
    header = _MAGIC + json.dumps({"file": name}).encode()
    comment_length = len(header) + 1 + _DIGEST_LENGTH
    tail = comment_length.to_bytes(_COMMENT_LENGTH, "little") + header + b" "
    with open(path, "r+b", buffering=0) as file:
        parts = parts_of_archive(file, path)
        end = file.seek(-_COMMENT_LENGTH, os.SEEK_END)
        digest = _hash(file, end, parts)
        digest.update(tail)
        file.seek(end)
        file.write(tail + digest.hexdigest().encode())
        os.fsync(file.fileno())


def read_file(path: str | os.PathLike[str]) -> Any:
    """Check and load a checkpoint onto the CPU, running no code from it.

    Args:
        path: A file that `write_file` or the reference's trainer wrote; or weights in a `.safetensors` file, which are
            returned as a checkpoint that holds nothing but the model.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
    """
    file = Path(path).expanduser()
    if file.suffix == ".safetensors":
        return {"state": {"model": read_tensors(file)[0]}}
    with _unpacked(file) as plain:
        return _load(plain)


def safe_torch_load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    load_monolith_rank0_only: bool = False,
) -> Any:
    """Check a file and load it with torch, running no code from it.

    Besides what `torch.load(weights_only=True)` allows, frozen sets, deques, dates and times, paths, decimals,
    fractions, UUIDs, and NumPy arrays of numbers, dates and text are loaded; more types after
    `torch.serialization.add_safe_globals([...])`.

    Args:
        path: A file that `torch.save` wrote, or an archive or a compressed file of one.
        map_location: The device of the tensors.
        load_monolith_rank0_only: True if only global rank 0 loads; the others return None.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds other types, which the message names, or its pickle protocol is one that torch
            does not read safely.
        MemoryError: It is larger than the free memory.
    """
    if load_monolith_rank0_only and dist.get_global_rank() != 0:
        return None
    check_nonempty_path("path", path)
    with _unpacked(Path(path).expanduser()) as plain:
        return _load(plain, map_location)


def check_file(path: str | os.PathLike[str]) -> str | None:
    """Check a checkpoint without loading it.

    A file without a checksum, such as one that another program wrote, is checked with the CRC-32 of each part of its
    archive.

    Returns:
        The file name under which it was saved (None if it is not recorded).

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
    """
    with _unpacked(Path(path).expanduser()) as plain, _open_checked(plain) as (_, saved_as):
        return saved_as


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
    with suppress(Exception), _stream(path, path.name) as stream:  # a damaged file, or an end that is cut off
        header = stream.read(30)  # the header of the archive's first part, whose layout zip specifies
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        name = stream.read(name_length)
        stream.read(extra_length)
        if header.startswith(b"PK\x03\x04") and name.endswith(b"/data.pkl"):
            return OutlineUnpickler(stream).load()
    return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: Path, map_location: str | torch.device = "cpu") -> Any:
    with _open_checked(path) as (file, saved_as):
        # Not by the path, where another file may be by now. Reading from a file object also releases the GIL.
        loaded = load_plain(file, str(path), map_location)
    if saved_as is None and isinstance(loaded, dict) and loaded.get("has_checksum"):
        reason = (
            "the checksum at its end is missing or altered (if you have changed and saved it yourself with "
            "`torch.save`, remove its entry 'has_checksum' before)"
        )
        raise CorruptCheckpointError(path, reason)
    return loaded


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yield the file as torch wrote it, unpacked from its archive if it is in one."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint {str(path)!r}. Give the path of one; without `load_path`, a new run starts."
        )
    name = path.resolve().name  # a link may have another extension
    if not (is_tar(name) or is_compressed_pt(name)):
        yield path
        return
    with scratch_folder("unpacked") as folder:
        plain = folder / STATES
        try:
            with _stream(path, name) as source, open(plain, "wb") as target:
                shutil.copyfileobj(source, target)
        except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RecursionError) as error:
            if getattr(error, "errno", None) is not None:  # the system's error, not the archive's
                raise
            raise CorruptCheckpointError(path, f"it cannot be unpacked ({error})") from error
        try:
            yield plain
        except CorruptCheckpointError as error:  # the message names the archive
            raise CorruptCheckpointError(path, error.reason) from error
        except UnsafeCheckpointError as error:
            raise UnsafeCheckpointError(str(error).replace(str(plain), str(path))) from error


@contextmanager
def _stream(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a checkpoint as torch wrote it, from its beginning; the extension of `name` is its format."""
    if is_tar(name):
        with tarfile.open(path, "r|*") as archive:
            member = next((member for member in archive if member.isfile() and Path(member.name).name == STATES), None)
            stream = None if member is None else archive.extractfile(member)
            if stream is None:
                raise CorruptCheckpointError(path, f"it holds no file {STATES!r}")
            yield stream
    elif is_compressed_pt(name):
        with get_compressor(name).decompress(str(path)) as stream:
            yield stream
    else:
        with open(path, "rb") as stream:
            yield stream


@contextmanager
def _open_checked(path: Path) -> Iterator[tuple[io.BufferedReader, str | None]]:
    """Open a checkpoint, and check it. Yield the file and the name that is recorded beside the checksum.

    Raises:
        CorruptCheckpointError: The file is not what was written.
    """
    size = path.stat().st_size
    if size == 0:
        raise CorruptCheckpointError(path, "it is empty")
    with open(path, "rb", buffering=0) as raw:
        start = raw.read(4)
        saved_as = _read_footer(raw, size, start)
        if saved_as is not None or start[:1] != b"\x80":  # torch before 1.6 wrote pickles, without checksums
            if start != b"PK\x03\x04" and saved_as is None:
                raise CorruptCheckpointError(path, "it is neither a zip archive nor a pickle")
            actual = _hash(raw, size - _DIGEST_LENGTH, parts_of_archive(raw, path), path).hexdigest()
            if saved_as is not None and actual != raw.read(_DIGEST_LENGTH).decode("latin-1"):
                raise CorruptCheckpointError(path, "its checksum does not match its content")
        raw.seek(0)
        yield io.BufferedReader(raw), saved_as


def _read_footer(file: io.FileIO, size: int, start: bytes) -> str | None:
    """Return the file name beside the checksum at the end of a file; None without one.

    Raises:
        CorruptCheckpointError: There is a comment, but no checksum in it.
    """
    file.seek(max(0, size - (1 << 16)))
    tail = file.read()
    footer = tail.rfind(_MAGIC)
    if footer >= 0:
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            name = json.loads(tail[footer + len(_MAGIC) : -_DIGEST_LENGTH - 1])["file"]
            if isinstance(name, str):
                return name
    # Readers of archives ignore a comment that is cut off or altered, but it was a checksum.
    if start == b"PK\x03\x04" and tail[tail.rfind(b"PK\x05\x06") + 20 :] != b"\0\0":
        raise CorruptCheckpointError(file.name, "the checksum at its end is cut off or altered")
    return None


def _hash(file: io.FileIO, end: int, parts: Mapping[str, Part], checked: Path | None = None) -> hashlib._Hash:
    """Return the running SHA-256 of the first `end` bytes of a file, except some parts; leave the file there.

    Args:
        file: The file.
        end: The number of bytes.
        parts: The parts by name, which are checked by their CRC-32 if `checked` is given.
        checked: The path of the file, for the message.

    Raises:
        CorruptCheckpointError: A part is not what was written.
    """
    digest, block, at = hashlib.sha256(), memoryview(bytearray(_BLOCK)), 0

    def read(size: int) -> Iterator[memoryview]:
        while size > 0 and (count := file.readinto(block[: min(size, _BLOCK)])):  # 0 if the file became shorter
            yield block[:count]
            size -= count

    for name in sorted(parts, key=parts.__getitem__):
        part = parts[name]
        file.seek(at)
        for data in read(part.start - at):
            digest.update(data)
        at = part.start + part.size
        if checked is not None:
            crc = 0
            for data in read(part.size):
                crc = crc32(data, crc)
            if crc != part.crc:
                raise CorruptCheckpointError(
                    checked, f"its checksum does not match its content, in its member {name!r}"
                )
    file.seek(at)
    for data in read(end - at):
        digest.update(data)
    return digest
