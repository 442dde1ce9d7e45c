"""The checksum at the end of a checkpoint, beside the name under which it was saved.

`torch.save` writes a zip archive of parts: one for the bytes of each tensor, one for the pickle, and some small ones.
For each part the archive's directory has a CRC-32, which torch computes while it writes. A zip archive may end with a
comment, so that `torch.load` and unzip still read the file. It holds

    composer-checkpoint-2 {"file": "ep1.pt"} <SHA-256 in hexadecimal digits>

The SHA-256 covers all bytes outside of the parts, from the beginning of the file to the digest itself: headers,
padding, the directory with its CRC-32s, and the comment. So the parts, which are nearly all of the file, are hashed
only once, while they are written. A CRC-32 detects every change within 32 successive bits, and misses one of 4 billion
other changes.

Files that begin their comment with `composer-checkpoint-1` have a SHA-256 of all bytes before it. They are still read,
and are still written if torch was told to compute no CRC-32 (`torch.serialization.set_crc32_options(False)`).

A file is never mapped into memory (`mmap=True` of `torch.load`): bytes could change after they were checked, and if
another program wrote to the file or truncated it in place, the process would read other values or die of SIGBUS.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from composer.checkpoint.storage import without_password

try:
    from isal.isal_zlib import crc32  # as fast as memory, several times as fast as zlib's
except ImportError:  # there are no wheels for every platform
    from zlib import crc32

_MAGIC = b"composer-checkpoint-"
_OF_ALL_BYTES, _OUTSIDE_PARTS = b"1 ", b"2 "  # the formats
_DIGEST_LENGTH = 64  # hexadecimal digits of a SHA-256
_COMMENT_LENGTH = 2  # bytes of the last field of a zip archive, the length of its comment
_BLOCK = 1 << 20
_HEADER = 30  # bytes of the header of a part, without its name
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), 20  # of the end of an archive
_THREADS = max(1, min(4, os.cpu_count() or 1) - 1)  # besides the one that loads; each is faster than it


class Part(NamedTuple):
    """The place of a part's data in a zip archive, in bytes, and their CRC-32."""

    start: int
    size: int
    crc: int


class CorruptCheckpointError(RuntimeError):
    """A checkpoint file is incomplete or modified. Nothing was loaded."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(
            f"The checkpoint {without_password(os.fspath(path))!r} is damaged: {reason}. Nothing was loaded. Load "
            f"another one; `autoresume=True` finds the newest intact one."
        )
        self.path, self.reason = os.fspath(path), reason


def append_checksum(path: Path, name: str, has_crc: bool = True) -> None:
    """Append the checksum to a zip archive without a comment, and flush the file to the disk.

    Args:
        path: The archive.
        name: The file name under which it is saved.
        has_crc: The directory has the CRC-32 of each part; otherwise the checksum covers the parts, too.
    """
    header = _MAGIC + (_OUTSIDE_PARTS if has_crc else _OF_ALL_BYTES) + json.dumps({"file": name}).encode()
    comment_length = len(header) + 1 + _DIGEST_LENGTH
    tail = comment_length.to_bytes(_COMMENT_LENGTH, "little") + header + b" "
    with open(path, "r+b", buffering=0) as file:
        parts = parts_of_archive(file, path) if has_crc else {}
        end = file.seek(-_COMMENT_LENGTH, os.SEEK_END)
        digest = _hash(file, end, parts)
        digest.update(tail)
        file.seek(end)
        write_all(file, tail + digest.hexdigest().encode())
        os.fsync(file.fileno())


def read_saved_name(path: Path) -> str | None:
    """Read the file name beside the checksum, unchecked; None if the file has no checksum."""
    return _read_footer(path)[1]


def _read_footer(path: Path) -> tuple[bytes, str | None]:
    """Return the format of the checksum, and the file name beside it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - 4096))
        tail = file.read()
    start = tail.rfind(_MAGIC)
    end = start + len(_MAGIC) + len(_OUTSIDE_PARTS)
    version = tail[end - len(_OUTSIDE_PARTS) : end]
    if start < 0 or version not in (_OF_ALL_BYTES, _OUTSIDE_PARTS):
        return b"", None
    try:
        name = json.loads(tail[end : -_DIGEST_LENGTH - 1])["file"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return b"", None
    return (version, name) if isinstance(name, str) else (b"", None)


def verify(path: Path) -> str | None:
    """Check a file without loading it.

    A file without a checksum, such as one that another program wrote, is checked with the CRC-32 of each part of a zip
    archive.

    Args:
        path: The file.

    Returns:
        The file name beside the checksum; None without one.

    Raises:
        CorruptCheckpointError: The file is not what was written.
    """
    with open_checked(path) as checked:
        return checked.saved_as


class CheckedFile(NamedTuple):
    """A checkpoint that is open for reading.

    Attributes:
        file: The file, at its beginning.
        saved_as: The file name beside the checksum; None without one.
    """

    file: io.BufferedReader
    saved_as: str | None


@contextmanager
def open_checked(path: Path) -> Iterator[CheckedFile]:
    """Open a checkpoint, and check it.

    When the body begins, everything but the bytes of tensors was checked. Those are checked in threads while the body
    runs, as reading and checksums release the GIL, and the context ends when they are checked, too. The content must
    not be used before that.

    Raises:
        CorruptCheckpointError: The file is not what was written.
    """
    size = path.stat().st_size
    if size == 0:
        raise CorruptCheckpointError(path, "it is empty")
    version, saved_as = _read_footer(path)
    if saved_as is None:
        _verify_archive(path)
    with open(path, "rb", buffering=0) as raw, ThreadPoolExecutor(_THREADS) as pool:
        parts = parts_of_archive(raw, path) if version == _OUTSIDE_PARTS else {}
        if saved_as is not None:
            actual = _hash(raw, size - _DIGEST_LENGTH, parts).hexdigest()
            if actual != raw.read(_DIGEST_LENGTH).decode("latin-1"):
                raise CorruptCheckpointError(path, "its checksum does not match its content")
        others, tensors = deque[tuple[str, Part]](), deque[tuple[str, Part]]()
        for item in parts.items():
            (tensors if "/data/" in item[0] else others).append(item)
        _check_parts(raw, path, others)
        raw.seek(0)
        running = [pool.submit(_check_parts, raw, path, tensors) for _ in range(_THREADS)]
        try:
            yield CheckedFile(io.BufferedReader(raw), saved_as)
            for future in running:
                future.result()
        finally:
            tensors.clear()  # the threads end


def _check_parts(file: io.FileIO, path: Path, parts: deque[tuple[str, Part]]) -> None:
    """Check parts by their CRC-32, and remove them from a queue that threads share."""
    block = memoryview(bytearray(_BLOCK))
    while parts:
        try:
            name, part = parts.popleft()
        except IndexError:  # another thread took the last one
            return
        crc, done = 0, 0
        while done < part.size and (count := _read_at(file, path, part.start + done, block[: part.size - done])):
            crc = crc32(block[:count], crc)
            done += count
        if done < part.size or crc != part.crc:
            raise CorruptCheckpointError(path, f"its checksum does not match its content, in its member {name!r}")


def _read_at(file: io.FileIO, path: Path, start: int, target: memoryview) -> int:
    """Read from an open file without moving its position."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [target], start)
    with open(path, "rb", buffering=0) as other:  # on Windows, where an open file cannot be replaced
        other.seek(start)
        return other.readinto(target) or 0


def _verify_archive(path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        tail = file.read()
    if start[:1] == b"\x80":
        return  # the format of torch before 1.6, a pickle, which has no checksums
    if start != b"PK\x03\x04":
        raise CorruptCheckpointError(path, "it is neither a zip archive nor a pickle")
    # Readers of archives ignore a comment that is cut off or altered, but it was a checksum.
    if tail[tail.rfind(b"PK\x05\x06") + 20 :] != b"\0\0":
        raise CorruptCheckpointError(path, "the checksum at its end is cut off or altered")
    with open(path, "rb") as file:
        parts_of_archive(file, path)
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise CorruptCheckpointError(path, f"it is not a complete zip archive ({error})") from error
    if broken is not None:
        raise CorruptCheckpointError(path, f"the checksum of its member {broken!r} does not match")


def parts_of_archive(file: IO[bytes], where: str | os.PathLike[str]) -> dict[str, Part]:
    """Return the parts of a zip archive by name, in the order of the archive.

    Only archives as `torch.save` writes them are accepted, with parts one after the other and not compressed. So the
    archive is as large as its content, and all readers see the same.

    Args:
        file: The archive.
        where: The name of the file, for the message.

    Raises:
        CorruptCheckpointError: It is not such an archive.
    """
    end, parts, folded = file.seek(0, os.SEEK_END), dict[str, Part](), set[str]()
    try:
        with zipfile.ZipFile(file) as archive:
            infos, begin = archive.infolist(), archive.start_dir
            tail = end - len(archive.comment) - _END.size
        following = begin
        for info in sorted(infos, key=lambda info: -info.header_offset):
            start = info.header_offset + _HEADER + _lengths(file, info.header_offset)
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CorruptCheckpointError(where, f"its member {info.filename!r} is compressed")
            if start + info.file_size > following:
                raise CorruptCheckpointError(where, f"its member {info.filename!r} overlaps with another")
            following = info.header_offset
            parts[info.filename] = Part(start, info.file_size, info.CRC)
            folded.add(info.filename.lower())
        if len(folded) < len(infos) or any(info.orig_filename != info.filename for info in infos):
            raise CorruptCheckpointError(where, "two of its members have one name")
        if begin != _declared_start(file, tail):
            raise CorruptCheckpointError(where, "its list of members is not at the recorded offset")
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CorruptCheckpointError(where, f"it is not a complete zip archive ({error})") from error
    return {info.filename: parts[info.filename] for info in infos}


def _lengths(file: IO[bytes], header: int) -> int:
    """Return the length of the name and the extra field of a part, which follow its header."""
    file.seek(header + _HEADER - 4)
    return sum(struct.unpack("<HH", file.read(4)))


def _declared_start(file: IO[bytes], tail: int) -> int:
    """Return the offset at which an archive says that its list of parts begins."""
    file.seek(tail)
    start: int = _END.unpack(file.read(_END.size))[6]
    if start == 0xFFFFFFFF:
        file.seek(tail - _END_64.size - _LOCATOR)
        start = _END_64.unpack(file.read(_END_64.size))[-1]
    return start


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb", buffering=0) as file:
        return _hash(file, path.stat().st_size, {}).hexdigest()


def _hash(file: io.FileIO, end: int, without: Mapping[str, Part]) -> hashlib._Hash:
    """Return the running SHA-256 of the first `end` bytes of a file, except some parts; leave the file there."""
    digest, block, at = hashlib.sha256(), memoryview(bytearray(_BLOCK)), 0
    for part in (*sorted(without.values()), Part(end, 0, 0)):
        file.seek(at)
        left = part.start - at
        while left > 0 and (count := file.readinto(block[: min(left, _BLOCK)])):  # 0 if the file became shorter
            digest.update(block[:count])
            left -= count
        at = part.start + part.size
    return digest


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write all bytes to a file without a buffer, where a single write takes 2 GiB at most."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
