"""The format of image files: what a shard holds, how one is read, and how one is written."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np

from composer.datasets._jpeg import encode_jpeg, index_jpeg, jpeg_shape
from composer.utils import check_finite

INDEX = "index.json"  # written last: a folder without it is not complete
PLAN = "plan.json"  # written first: what an interrupted writer continues
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),  # the size of its index, which follows it, is not included
        ("index_size", "<u4"),
        ("crc32", "<u4"),  # checksum of both
        ("label", "<i4"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("kind", "<u4"),
    ]
)
"""The fields of an image in a shard."""

JPEG, RAW, OTHER = range(3)  # kinds: decoded by simplejpeg; pixels of shape (H, W, 3); decoded by Pillow
TRAILER = struct.Struct("<QQI4s")  # offset of the records, their number, their crc32, MAGIC
MAGIC = b"CIF1"

PARTIAL = ".partial"  # ends the names of files that are being written
_DEFAULT_QUALITY = 90


@dataclass(frozen=True)
class WriteOptions:
    """Options of the stored images. By default image files are copied byte for byte, and pixels stay pixels.

    Args:
        max_side: Shrink images so that the longer side has at most this many pixels.
        short_side: Shrink images so that the shorter side has at most this many pixels.
        quality: Encode images as JPEG with this quality. None: 90 for images that were shrunk; others are unchanged.
            `ImageFiles` decodes parts of such images at the cost of the part.

    Raises:
        ValueError: A number is out of range, or both sides are given.
    """

    max_side: int | None = None
    short_side: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.max_side is not None and self.short_side is not None:
            raise ValueError(
                f"`max_side` and `short_side` must not be given together, got {self.max_side} and {self.short_side}."
            )
        for name, most in (("max_side", 65_535), ("short_side", 65_535), ("quality", 100)):
            if (value := getattr(self, name)) is not None:
                check_finite(**{name: value}, least=1, most=most)

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which an image is shrunk."""
        limit, side = self.max_side or self.short_side, max(height, width)
        if self.max_side is None:
            side = min(height, width)
        if limit is None or side <= limit:
            return height, width
        return max(round(height * limit / side), 1), max(round(width * limit / side), 1)


def shard_name(number: int) -> str:
    """Return the name of a file by its number."""
    return f"shard-{number:05d}.bin"


class Shard:
    """A memory-mapped file: the bytes of images, one record for each, and a trailer.

    Args:
        path: The file.

    Attributes:
        records: Array of `RECORD`, one for each image.

    Raises:
        ValueError: It is not such a file, or not complete.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(0, 2)
            if file.tell() < TRAILER.size:
                raise ValueError(f"{str(path)!r} is not a file of `composer-datasets write`.")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offset, count, crc32, magic = TRAILER.unpack(self._map[-TRAILER.size :])
        stored = self._map[offset : -TRAILER.size]
        if magic != MAGIC or len(stored) != count * RECORD.itemsize or zlib.crc32(stored) != crc32:
            raise ValueError(f"{str(path)!r} is not a file of `composer-datasets write`, or is damaged.")
        self.records = np.frombuffer(stored, RECORD)

    def read(self, record: tuple[int, ...]) -> tuple[bytes, bytes]:
        """Return the bytes of an image, and those of its index."""
        offset, size, index_size = record[:3]
        end = offset + size
        return self._map[offset:end], self._map[end : end + index_size]

    def is_intact(self, record: tuple[int, ...]) -> bool:
        """Return True if an image and its index have their checksum."""
        data, index = self.read(record)
        return zlib.crc32(index, zlib.crc32(data)) == record[3]

    def prefetch(self, record: tuple[int, ...]) -> None:
        """Let the operating system read an image from the disk in the background, where it can."""
        if hasattr(mmap, "MADV_WILLNEED"):
            start = record[0] - record[0] % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, record[0] + record[1] - start)


@dataclass(frozen=True)
class ShardTask:
    """A file to write."""

    path: Path
    images: Sequence[Any]
    labels: Sequence[int]
    options: WriteOptions

    def is_done(self) -> bool:
        """Return True if an earlier call finished the file."""
        if not self.path.is_file():
            return False
        try:
            return len(Shard(self.path).records) == len(self.images)
        except ValueError:
            return False  # written again

    def write(self, on_image: Callable[[], object]) -> None:
        """Write the file."""
        records = np.zeros(len(self.images), RECORD)
        with durable(self.path) as file:
            for place, (image, label) in enumerate(zip(self.images, self.labels, strict=True)):
                data, height, width, kind = _encode(image, self.options)
                index = index_jpeg(data) if kind == JPEG else b""
                crc32 = zlib.crc32(index, zlib.crc32(data))
                records[place] = (file.tell(), len(data), len(index), crc32, label, height, width, kind)
                file.write(data + index)
                on_image()
            stored, offset = records.tobytes(), file.tell()
            file.write(stored)
            file.write(TRAILER.pack(offset, len(records), zlib.crc32(stored), MAGIC))


def _encode(image: Any, options: WriteOptions) -> tuple[bytes, int, int, int]:
    """Return the bytes to store, height and width, and the kind."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        size = image.shape[:2]
        if options.quality is None and options.new_size(*size) == size:
            return image.tobytes(), *size, RAW
        picture = Image.fromarray(image)
    else:
        data = Path(image).read_bytes()
        try:
            picture = Image.open(BytesIO(data))
            size = (picture.height, picture.width)
            if options.quality is None and options.new_size(*size) == size:
                if jpeg_shape(data) == size:
                    return data, *size, JPEG
                picture.load()  # Pillow decodes other formats, and JPEGs with flaws that simplejpeg refuses
                return data, *size, OTHER
            picture = picture.convert("RGB")
        except OSError as error:
            raise ValueError(f"{str(image)!r} cannot be read as an image: {error}. Remove or replace it.") from error
    height, width = options.new_size(*size)
    if (height, width) != size:
        picture = picture.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return encode_jpeg(picture, options.quality or _DEFAULT_QUALITY), height, width, JPEG


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name when it is complete and on the disk."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL}")  # other nodes may write it too
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
