"""Output of the ranks: into files, and onto the console.

torch's own tees are not enough: existing files would be shown from their beginning, and the console would get
unfinished lines.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import tempfile
import threading

from composer.cli._plan import Plan

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 20
_POLL_SECONDS = 0.1
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ")  # torch's prefix of traceback lines, once there is a process group


class Outputs:
    """The output of all local ranks, and a thread that shows it on the console.

    Local rank 0 inherits stdout and stderr of the launcher, so its last lines are not known when it fails.

    Args:
        plan: What is started.
    """

    def __init__(self, plan: Plan) -> None:
        self._folder = tempfile.mkdtemp(prefix="composer_")
        self._stdout, self._stderr = (
            [self._path(plan, pattern, name, rank) for rank in range(plan.nproc)]
            for name, pattern in (("stdout", plan.stdout), ("stderr", plan.stderr))
        )
        self._files: dict[str, _LogFile] = {}
        for rank in range(plan.nproc):
            prefix = f"[rank{plan.base_rank + rank}]: " if plan.verbose else None
            # Both streams may go to one file.
            for path, descriptor in ((self._stderr[rank], 2), (self._stdout[rank], 1)):
                if path:
                    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                    self._files.setdefault(path, _LogFile(path, descriptor, prefix))
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._show, name="composer-output", daemon=True)
        self._thread.start()

    def _path(self, plan: Plan, pattern: str | None, name: str, rank: int) -> str:
        if rank == 0 and not plan.captures_first:
            return ""
        if pattern is None:
            return os.path.join(self._folder, f"rank{plan.base_rank + rank}.{name}.txt")
        return plan.path(pattern, rank)

    def paths(self, local_rank: int) -> tuple[str, str]:
        """Return the files of a rank's stdout and stderr; "": inherited from the launcher."""
        return self._stdout[local_rank], self._stderr[local_rank]

    def log(self, local_rank: int) -> str | None:
        """Return the file with a rank's stderr. None: it was shown on the console."""
        path = self._stderr[local_rank]
        return path if path in self._files else None

    def tail(self, local_rank: int) -> list[str]:
        """Return the last lines of a rank's stderr; none if it was shown on the console."""
        file = self._files.get(self._stderr[local_rank])
        if file is None:
            return []
        lines = file.tail().decode(errors="replace").split("\n")
        visible = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)  # progress bars overwrite lines
        return [_TORCH_PREFIX.sub("", line, count=1) for line in visible if line][-_TAIL_LINES:]

    def finish(self) -> None:
        """Show the remaining output. Call it when all ranks have exited."""
        self._finished.set()
        self._thread.join()

    def close(self, keep: bool) -> None:
        """Remove the temporary files, unless `keep` is True."""
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _show(self) -> None:
        while not self._finished.wait(_POLL_SECONDS):
            self._show_files()
        self._show_files(final=True)

    def _show_files(self, final: bool = False) -> None:
        for file in self._files.values():
            _write(file.descriptor, file.read_lines(final))


class _LogFile:
    """A file that a rank writes to, followed from its current end.

    Args:
        path: The file; existing content is from an earlier run.
        descriptor: The descriptor on which its lines are shown.
        prefix: The prefix of every line. None: do not show the file.
    """

    def __init__(self, path: str, descriptor: int, prefix: str | None) -> None:
        self.descriptor = descriptor
        self._path, self._prefix = path, None if prefix is None else prefix.encode()
        self._start = self._position = os.path.getsize(path) if os.path.exists(path) else 0
        self._rest = b""

    def read_lines(self, final: bool) -> bytes:
        """Return the new lines, with prefixes; `final` includes an unfinished line."""
        if self._prefix is None:
            return b""
        data = self._rest + self._read(self._position)
        self._position += len(data) - len(self._rest)
        *lines, self._rest = data.split(b"\n")
        if final and self._rest:
            lines.append(self._rest)
        shown = b""
        for line in lines:
            visible = line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"  # progress bars overwrite lines
            shown += visible if visible.startswith(self._prefix) else self._prefix + visible
        return shown

    def tail(self) -> bytes:
        """Return the last bytes of this run."""
        size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        return self._read(max(self._start, size - _TAIL_BYTES))

    def _read(self, position: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(position)
                return file.read()
        except FileNotFoundError:  # the process has not created it yet
            return b""


def print_message(message: str, *more: str) -> None:
    """Print a message of the launcher, and further lines, to stderr. Never raises: the ranks matter more."""
    _write(2, "".join(f"{line}\n" for line in (f"composer: {message}", *more)).encode(errors="replace"))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process made the shared descriptor non-blocking
            select.select([], [descriptor], [])
        except OSError:  # the terminal or the reader is gone; the ranks continue
            return
