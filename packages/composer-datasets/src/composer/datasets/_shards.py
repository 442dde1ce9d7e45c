"""The files of a folder of images: their bytes one after the other, and a table of where each image is."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

INDEX = "index.json"  # written last: a folder without it is not complete
VERSION = 2  # of the format; nothing else is read
PLAN = "plan.json"  # written first: what an interrupted writer continues
RECORD = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<i4"), ("height", "<u4"), ("width", "<u4")])
"""The fields of an image in a table."""

PARTIAL = ".partial"  # ends the names of files that are being written


def shard_name(number: int) -> str:
    """Return the name of a file by its number; its table has the suffix `.npy`."""
    return f"shard-{number:05d}.bin"


class Shard:
    """A memory-mapped file, and its table.

    Args:
        path: The file.

    Attributes:
        records: Array of `RECORD`, one for each image.
    """

    def __init__(self, path: Path) -> None:
        self.records = np.load(path.with_suffix(".npy"))
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes of an image."""
        return self._map[offset : offset + size]

    def prefetch(self, offset: int, size: int) -> None:
        """Let the operating system read an image from the disk in the background, where it can."""
        if hasattr(mmap, "MADV_WILLNEED"):
            start = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + size - start)


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
