"""Other output on the terminal of a progress bar: prints, warnings and log records get lines of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any


class BarAwareStreams:
    """While active, erases a bar before other code writes a line to the terminal; the bar then redraws itself.

    The standard streams are replaced if they are terminals, and so are those of logging handlers that write to them.

    Args:
        clear: Erases the bar.
    """

    def __init__(self, clear: Callable[[], None]) -> None:
        self._clear = clear
        self._streams: dict[str, _Stream] = {}
        self._handlers: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Replace the streams, unless they are replaced already."""
        if self._streams:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._streams[name] = _Stream(stream, self._clear)
                setattr(sys, name, self._streams[name])
        for handler in _stream_handlers():
            for around in self._streams.values():
                if handler.stream is around.inner:
                    self._handlers.append((handler, around))
                    handler.setStream(around)

    def stop(self) -> None:
        """Put the streams back; where other code has replaced one of ours, it only passes text on from now on."""
        for name, around in self._streams.items():
            around.end()
            if getattr(sys, name) is around:
                setattr(sys, name, around.inner)
        for handler, around in self._handlers:
            if handler.stream is around:
                handler.setStream(around.inner)
        self._streams, self._handlers = {}, []


class _Stream:
    """A text stream that erases a bar before it writes, and holds back a line that is not complete."""

    def __init__(self, inner: Any, clear: Callable[[], None]) -> None:
        self.inner = inner
        self._clear: Callable[[], None] | None = clear
        self._held, self._lock = "", RLock()

    def write(self, text: str) -> int:
        with self._lock:
            self._held += text
            if self._clear is None or "\n" in text or "\r" in text:
                self._pass_on()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            if self._held:
                self._pass_on()
            self.inner.flush()

    def end(self) -> None:
        """Only pass text on from now on."""
        self.flush()
        self._clear = None

    def _pass_on(self) -> None:
        if self._clear is not None:
            self._clear()
        text, self._held = self._held, ""
        self.inner.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _stream_handlers() -> Iterator[Any]:
    known = [logging.root, *(each for each in logging.root.manager.loggerDict.values())]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler
