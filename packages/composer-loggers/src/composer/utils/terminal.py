"""The stream that messages and progress bars are written to; in a notebook, the output of the cell."""

from __future__ import annotations

import secrets
import sys
from importlib import import_module
from typing import Any, TextIO

from composer.utils.misc import is_notebook


def open_stream(stream: TextIO | str) -> TextIO:
    """Return a stream, or the current standard stream of that name.

    In a notebook "stderr" also means `sys.stdout`: notebooks show text on `sys.stderr` as an error.

    Args:
        stream: "stdout", "stderr" or a text stream.

    Raises:
        ValueError: The name is unknown.
        TypeError: `stream` is neither a string nor writable.

    Example:
        >>> print("ready", file=open_stream("stdout"))
        ready
    """
    if isinstance(stream, str):
        if stream.lower() not in ("stdout", "stderr"):
            raise ValueError(f"`stream` must be 'stdout', 'stderr' or a text stream, got {stream!r}.")
        return sys.stdout if stream.lower() == "stdout" or is_notebook() else sys.stderr
    if not callable(getattr(stream, "write", None)):
        raise TypeError(f"`stream` must be 'stdout', 'stderr' or a text stream, got {stream!r}.")
    return stream


def bar_file(stream: TextIO) -> Any:
    """Return the `file` argument for a tqdm progress bar that is shown on a stream.

    Args:
        stream: As returned by `open_stream`.

    Returns:
        The stream; for the standard streams of a notebook, an object that updates one output of the current cell.
    """
    return _CellOutput() if is_notebook() and stream in (sys.stdout, sys.stderr) else stream


class _CellOutput:
    """A file for tqdm that shows its line as one output of a notebook cell and updates that output.

    The output is plain text, because widgets need scripts that some front ends download.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._id = secrets.token_hex(16)
        self._shown: str | None = None

    def write(self, text: str) -> int:
        line = text.strip("\r\n ")
        erased = not line and "\r" in text and self._shown is not None
        if line or erased:
            display = import_module("IPython.display").display
            display({"text/plain": line}, raw=True, display_id=self._id, update=self._shown is not None)
            self._shown = line
        return len(text)

    def flush(self) -> None:
        """Do nothing: outputs are sent immediately."""
