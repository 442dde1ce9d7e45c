"""Where the ranks' output goes, and what of it is shown."""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence

from composer.cli._plan import Plan

__all__ = ["Outputs", "tell"]

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 20
_POLL_SECONDS = 0.1
_LINE_SECONDS = 0.2  # a line that is not finished by then may be a progress bar
_CHUNK = 64 * 1024
_TORCHS_PREFIX = re.compile(r"\[rank\d+\]: ")  # before each line of a traceback, once there is a process group


class Outputs:
    """The files of all local ranks, and a thread that shows what is to be shown.

    Local rank 0 has the stdout of the launcher. Its stderr comes through here, unchanged and at once, so that its end
    can be told when it fails; if the launcher's is a terminal, so is what the rank gets.

    Args:
        plan: What is started.
    """

    def __init__(self, plan: Plan) -> None:
        self._folder = tempfile.mkdtemp(prefix="composer_")
        self._stdout, self._stderr = (
            [self._path(plan, pattern, name, rank) for rank in range(plan.nproc)]
            for name, pattern in (("stdout", plan.stdout), ("stderr", plan.stderr))
        )
        self._passing: _Passed | None = None
        self._followed: dict[str, _Followed] = {}
        for rank in range(plan.nproc):
            prefix = f"[rank{plan.base_rank + rank}]: " if plan.verbose else None
            # Both may go to one file.
            for path, descriptor in ((self._stderr[rank], 2), (self._stdout[rank], 1)):
                if path:
                    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                    self._followed.setdefault(path, _Followed(path, descriptor, prefix))
        if not self._stderr[0]:
            self._passing = _Passed(os.path.join(self._folder, "stderr0"))
            self._stderr[0] = self._passing.path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="composer-output", daemon=True)
        self._thread.start()

    def _path(self, plan: Plan, pattern: str | None, name: str, rank: int) -> str:
        if rank == 0 and not plan.captures_first:
            return ""
        if pattern is None:
            return os.path.join(self._folder, f"rank{plan.base_rank + rank}.{name}.txt")
        return plan.path(pattern, rank)

    def paths(self, local_rank: int) -> tuple[str, str]:
        """Where a rank's stdout and stderr go; "": where the launcher's goes."""
        return self._stdout[local_rank], self._stderr[local_rank]

    def log(self, local_rank: int) -> str | None:
        """The file with a rank's stderr; None: it was shown."""
        path = self._stderr[local_rank]
        return path if path in self._followed else None

    def tail(self, local_rank: int) -> list[str]:
        """The last lines of what a rank wrote to stderr."""
        path = self._stderr[local_rank]
        if path in self._followed:
            content = self._followed[path].tail()
        else:
            assert self._passing is not None, "a rank has a file or is passed on"
            content = self._passing.tail()
        lines = content.decode(errors="replace").split("\n")
        # A progress bar writes over itself.
        visible = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
        return [_TORCHS_PREFIX.sub("", line, count=1) for line in visible if line][-_TAIL_LINES:]

    def finish(self) -> None:
        """Show what has not been shown yet. To be called when no rank runs any more."""
        self._ended.set()
        self._thread.join()
        if self._passing is not None:
            self._passing.drain()

    def close(self, keep: bool) -> None:
        """Finish.

        Args:
            keep: Whether the temporary files stay.
        """
        if self._passing is not None:
            self._passing.close()
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _show(self) -> None:
        shown = [followed for followed in self._followed.values() if followed.prefix is not None]
        while not self._ended.is_set():
            if self._passing is None:
                self._ended.wait(_POLL_SECONDS)
            else:
                self._passing.wait(_POLL_SECONDS)
            if self._passing is None or not self._passing.is_writing:
                self._show_lines(shown)
        self._show_lines(shown, everything=True)

    def _show_lines(self, shown: Sequence[_Followed], everything: bool = False) -> None:
        for followed in shown:
            lines = followed.lines(everything)
            if lines and self._passing is not None:
                self._passing.end_line()
            _write(followed.descriptor, lines)


class _Passed:
    """What one process writes to stderr, passed on to that of this process.

    Args:
        path: A named pipe is made there, unless a terminal is used.
    """

    def __init__(self, path: str) -> None:
        self._terminal = _terminal_like(2)
        if self._terminal is not None:
            self.path = os.ttyname(self._terminal[1])
            self._source = self._terminal[0]
            os.set_blocking(self._source, False)
        else:
            os.mkfifo(path)
            self.path = path
            self._source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._writer = os.open(path, os.O_WRONLY)  # else the end of the first process would be the end of the pipe
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._written = 0.0
        self._in_line = False

    @property
    def is_writing(self) -> bool:
        """Whether it is just in the middle of a line."""
        return self._in_line and time.monotonic() < self._written + _LINE_SECONDS

    def end_line(self) -> None:
        """Leave the line that it is in, such as that of a progress bar."""
        if self._in_line:
            _write(2, b"\n")
            self._in_line = False

    def wait(self, seconds: float) -> None:
        """Wait until there is something, for some time, and pass it on."""
        if select.select([self._source], [], [], seconds)[0]:
            self.drain()

    def drain(self) -> None:
        """Pass on what there is."""
        with self._lock:
            while True:
                try:
                    data = os.read(self._source, _CHUNK)
                except BlockingIOError:
                    return
                if not data:
                    return
                self._keep(data)
                _write(2, data)
                self._written, self._in_line = time.monotonic(), not data.endswith(b"\n")

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._size += len(data)
        while self._size - len(self._kept[0]) >= _TAIL_BYTES:
            self._size -= len(self._kept.popleft())

    def tail(self) -> bytes:
        """The last of it."""
        self.drain()
        return b"".join(self._kept)

    def close(self) -> None:
        """Release it."""
        for descriptor in self._terminal or (self._source, self._writer):
            os.close(descriptor)


class _Followed:
    """A file that a process writes.

    Args:
        path: The file; what is in it already is of an earlier run.
        descriptor: Where its lines are shown.
        prefix: Put before every line; None: it is not shown.
    """

    def __init__(self, path: str, descriptor: int, prefix: str | None) -> None:
        self.prefix, self.descriptor = prefix, descriptor
        self._path = path
        self._start = os.path.getsize(path) if os.path.exists(path) else 0
        self._position, self._rest = self._start, b""

    def lines(self, everything: bool) -> bytes:
        """The new lines, with prefixes.

        Args:
            everything: Whether an unfinished line counts.
        """
        data = self._rest + self._read(self._position)
        self._position += len(data) - len(self._rest)
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if everything and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(map(self._prefixed, lines))

    def _prefixed(self, line: bytes) -> bytes:
        prefix = (self.prefix or "").encode()
        visible = line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"  # a progress bar writes over itself
        return visible if visible.startswith(prefix) else prefix + visible

    def tail(self) -> bytes:
        """The last of it."""
        size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        return self._read(max(self._start, size - _TAIL_BYTES))

    def _read(self, position: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(position)
                return file.read()
        except FileNotFoundError:  # the process has not begun
            return b""


def tell(*lines: str) -> None:
    """Tell the user something, on stderr. Never fails: the ranks matter more."""
    _write(2, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # whoever shares it has made it so
            select.select([], [descriptor], [])
        except OSError:  # the terminal or the reader is gone; the ranks go on
            return


def _terminal_like(descriptor: int) -> tuple[int, int] | None:
    """A new terminal (this side, the other side) that looks like that of `descriptor`; None if that is not one."""
    if not os.isatty(descriptor) or sys.platform == "win32":
        return None
    import fcntl
    import pty
    import termios

    here, there = pty.openpty()
    attributes = termios.tcgetattr(there)
    attributes[1] &= ~termios.OPOST  # the real one adds what a line's end needs
    termios.tcsetattr(there, termios.TCSANOW, attributes)
    fcntl.ioctl(there, termios.TIOCSWINSZ, fcntl.ioctl(descriptor, termios.TIOCGWINSZ, b"\0" * 8))
    return here, there
