"""Event files of TensorBoard, fast.

Scalars are most of what is logged, and their thread shares the interpreter with the training. Checksums come from C:
those that tensorboard computes in Python take most of the time. What remains is mostly the making of objects of
protobuf, one per scalar, so events with scalars are encoded here.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

__all__ = ["EventFile", "Writer"]

_MASK = 0xFFFFFFFF
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_numbers = itertools.count()  # two files of one second must not have one name


class EventFile:
    """One event file: records of the TFRecord format, each an `Event`.

    It has the methods of `tensorboard.summary.writer.event_file_writer.EventFileWriter`, but writes in the thread that
    calls. Threads may share one.

    Args:
        folder: Where to make the file; made if it does not exist.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = os.path.join(folder, name)
        self._folder = folder
        self._lock = threading.Lock()
        self._before: dict[str, bytes] = {}  # by tag
        self._file = open(self.path, "xb", buffering=1 << 18)  # noqa: SIM115 - closed by `close`
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def get_logdir(self) -> str:
        """The folder."""
        return self._folder

    def add_event(self, event: Any) -> None:
        """Append an event."""
        self._write(event.SerializeToString())

    def add_scalars(self, scalars: Sequence[tuple[str, float]], step: int, seconds: float) -> None:
        """Append an event with scalars.

        Args:
            scalars: Numbers with their tags.
            step: Of all of them.
            seconds: Since 1970, when they were logged.
        """
        parts: list[bytes] = []
        for tag, number in scalars:
            parts += (self._before.get(tag) or self._begin(tag), _float(number))
        summary = b"".join(parts)
        # Fields 1, 2 and 5 of `Event`: the time, the step, the summary.
        head = (b"\x09", _DOUBLE.pack(seconds), b"\x10", _varint(step), b"\x2a", _varint(len(summary)))
        self._write(b"".join((*head, summary)))

    def _begin(self, tag: str) -> bytes:
        """What comes before the number of a scalar: field 1 of `Summary`, which is a `Value` with fields 1 and 2."""
        name = tag.encode()
        value = b"".join((b"\x0a", _varint(len(name)), name, b"\x15"))
        found = self._before[tag] = b"".join((b"\x0a", _varint(len(value) + _FLOAT.size), value))
        return found

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        with self._lock:
            self._file.write(b"".join((length, _checksum(length), data, _checksum(data))))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._lock:
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        """Complete the file."""
        with self._lock:
            self._file.close()


class _FileWriter(FileWriter):
    def __init__(self, folder: str) -> None:
        self.event_writer: Any = EventFile(folder)


class Writer(SummaryWriter):
    """A `SummaryWriter` that writes to an `EventFile`."""

    def _get_file_writer(self) -> Any:
        if self.all_writers is None or self.file_writer is None:
            self.file_writer: Any = _FileWriter(self.log_dir)
            self.all_writers: Any = {self.log_dir: self.file_writer}
        return self.file_writer


def _float(number: float) -> bytes:
    try:
        return _FLOAT.pack(number)
    except OverflowError:  # as protobuf does
        return _FLOAT.pack(math.copysign(math.inf, number))


def _varint(number: int) -> bytes:
    """An integer of protobuf: seven bits per byte, the lowest first; negative ones in 64 bits."""
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of the TFRecord format."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _MASK)
