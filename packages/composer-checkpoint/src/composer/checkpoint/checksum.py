"""The checksum at the end of a checkpoint, beside the name under which it was saved.

`torch.save` writes a zip archive, and a zip archive may end with a comment. The checksum is in that comment, so
`torch.load` and unzip still read the file. It is the SHA-256 of every byte before it: if a file is torn, truncated or
altered, the checksum does not match, which is detected before anything of the file is interpreted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

__all__ = ["CorruptCheckpointError", "append_checksum", "parts_of_archive", "read_footer", "sha256_of", "verify"]

_MAGIC = b"composer-checkpoint-1 "
_DIGEST_LENGTH = 64  # hexadecimal digits of a SHA-256
_COMMENT_LENGTH = 2  # bytes of the last field of a zip archive, the length of its comment
_BLOCK = 1 << 20
_HEADER = 30  # bytes of the header of a part, without its name
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), 20  # of the end of an archive


class CorruptCheckpointError(RuntimeError):
    """A checkpoint file is torn, truncated or altered. Nothing was loaded."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(
            f"The checkpoint {os.fspath(path)!r} is damaged: {reason}. Nothing was loaded. Load another one; "
            f"`autoresume=True` finds the newest intact one."
        )
        self.path, self.reason = os.fspath(path), reason


def append_checksum(path: Path, name: str) -> None:
    """Append the checksum to a zip archive without a comment, and flush the file to the disk.

    Args:
        path: The archive.
        name: The file name under which it is saved.
    """
    header = _MAGIC + json.dumps({"file": name}).encode()
    comment_length = len(header) + 1 + _DIGEST_LENGTH
    with open(path, "r+b", buffering=0) as file, ThreadPoolExecutor(1) as disk:
        # The data are flushed to the disk while they are hashed.
        flushed = disk.submit(os.fsync, file.fileno())
        end = file.seek(-_COMMENT_LENGTH, os.SEEK_END)
        digest = _hash(file, end)
        flushed.result()
        tail = comment_length.to_bytes(_COMMENT_LENGTH, "little") + header + b" "
        digest.update(tail)
        file.seek(end)
        _write_all(file, tail + digest.hexdigest().encode())
        os.fsync(file.fileno())


def read_footer(path: Path) -> Mapping[str, str] | None:
    """Read the file name beside the checksum, unchecked: `{"file": name}`; None if the file has no checksum."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - 4096))
        tail = file.read()
    start = tail.rfind(_MAGIC)
    if start < 0:
        return None
    try:
        content = json.loads(tail[start + len(_MAGIC) : -_DIGEST_LENGTH - 1])
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("file"), str) else None


def verify(path: Path) -> Mapping[str, str] | None:
    """Check a file before anything of it is loaded.

    A file without a checksum, such as one that another program wrote, is checked with the CRC-32 of each part of a zip
    archive.

    Args:
        path: The file.

    Returns:
        `{"file": name}`, as saved beside the checksum; None without one.

    Raises:
        CorruptCheckpointError: The file is not what was written.
    """
    size = path.stat().st_size
    if size == 0:
        raise CorruptCheckpointError(path, "it is empty")
    content = read_footer(path)
    if content is None:
        _verify_archive(path)
        return None
    with open(path, "rb", buffering=0) as file:
        actual = _hash(file, size - _DIGEST_LENGTH).hexdigest()
        expected = file.read(_DIGEST_LENGTH).decode("latin-1")
    if actual != expected:
        raise CorruptCheckpointError(path, "its checksum does not match its content")
    return content


def _verify_archive(path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        tail = file.read()
    if start[:1] == b"\x80":
        return  # the format of torch before 1.6, a pickle, which has no checksums
    if start != b"PK\x03\x04":
        raise CorruptCheckpointError(path, "it does not begin like a checkpoint")
    # Readers of archives ignore a comment that is cut off or altered, but it was a checksum.
    if tail[tail.rfind(b"PK\x05\x06") + 20 :] != b"\0\0":
        raise CorruptCheckpointError(path, "the checksum at its end is cut off or altered")
    with open(path, "rb") as file:
        parts_of_archive(file, path)
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise CorruptCheckpointError(path, f"it is not a whole archive ({error})") from error
    if broken is not None:
        raise CorruptCheckpointError(path, f"the checksum of its part {broken!r} does not match")


def parts_of_archive(file: IO[bytes], where: str | os.PathLike[str]) -> dict[str, tuple[int, int]]:
    """Return the offset and size in bytes of each part of a zip archive, in the order of the archive.

    Only archives as `torch.save` writes them are accepted, with parts one after the other and not compressed. So the
    archive is as large as its content, and all readers see the same.

    Args:
        file: The archive.
        where: The name of the file, for the message.

    Raises:
        CorruptCheckpointError: It is not such an archive.
    """
    end, parts, folded = file.seek(0, os.SEEK_END), {}, set()
    try:
        with zipfile.ZipFile(file) as archive:
            infos, begin = archive.infolist(), archive.start_dir
            tail = end - len(archive.comment) - _END.size
        following = begin
        for info in sorted(infos, key=lambda info: -info.header_offset):
            start = info.header_offset + _HEADER + _lengths(file, info.header_offset)
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CorruptCheckpointError(where, f"its part {info.filename!r} is compressed")
            if start + info.file_size > following:
                raise CorruptCheckpointError(where, f"its part {info.filename!r} overlaps with another")
            following = info.header_offset
            parts[info.filename] = start, info.file_size
            folded.add(info.filename.lower())
        if len(folded) < len(infos) or any(info.orig_filename != info.filename for info in infos):
            raise CorruptCheckpointError(where, "two of its parts have one name")
        if begin != _declared_start(file, tail):
            raise CorruptCheckpointError(where, "its list of parts is not where it says")
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CorruptCheckpointError(where, f"it is not a whole archive ({error})") from error
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
        return _hash(file, path.stat().st_size).hexdigest()


def _hash(file: io.FileIO, end: int) -> hashlib._Hash:
    """Return the running SHA-256 of the first `end` bytes of a file; leave the file there."""
    digest = hashlib.sha256()
    file.seek(0)
    block = memoryview(bytearray(_BLOCK))
    left = end
    while left > 0 and (count := file.readinto(block[: min(left, _BLOCK)])):  # 0 if the file became shorter
        digest.update(block[:count])
        left -= count
    return digest


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
