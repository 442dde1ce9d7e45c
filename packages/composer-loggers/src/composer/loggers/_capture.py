"""Copies what is written to a stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

__all__ = ["Capture", "LineAssembler"]


class Capture:
    """Passes everything written to a stream on to a function as well, until closed.

    The stream's `write` is replaced, not the stream, so whoever holds the stream (logging handlers, progress bars) is
    captured too.

    Args:
        stream: The stream; what is written still goes there.
        sink: Called with the text. Not called in forked processes, such as the workers of a dataloader.
    """

    def __init__(self, stream: TextIO, sink: Callable[[str], None]) -> None:
        self._stream = stream
        self._sink = sink
        self._pid = os.getpid()
        self._active = True
        self._inherited = "write" not in vars(stream)
        self._original = stream.write
        self._replacement = self._write  # one object, to be recognised in `close`
        stream.write = self._replacement  # type: ignore[method-assign]

    def _write(self, text: str) -> int:
        written = self._original(text)
        if self._active and os.getpid() == self._pid:
            self._sink(text)
        return written

    def close(self) -> None:
        """Give the stream its own `write` back; safe to call twice."""
        self._active = False
        if vars(self._stream).get("write") is not self._replacement:
            return  # somebody replaced it after us; we pass through from now on
        if self._inherited:
            del self._stream.write
        else:
            self._stream.write = self._original  # type: ignore[method-assign]


class LineAssembler:
    """Makes lines out of written pieces, without what a carriage return takes back (older states of a progress bar).

    Args:
        sink: Called with each finished line, without its newline.
    """

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._rest = ""

    def feed(self, text: str) -> None:
        """Take the next piece."""
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            self._sink(_visible(line.removesuffix("\r")))
        # A carriage return at the very end may be the first half of a line end.
        self._rest = _visible(rest[:-1]) + "\r" if rest.endswith("\r") else _visible(rest)

    def finish(self) -> None:
        """Take what has no newline yet for a line."""
        rest, self._rest = self._rest.removesuffix("\r"), ""
        if rest:
            self._sink(rest)


def _visible(line: str) -> str:
    return line.rpartition("\r")[2].rstrip(" ") if "\r" in line else line
