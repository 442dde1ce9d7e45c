"""What each process runs first: its output is put in place, then it becomes the user's program.

Run as a file and with the standard library only, so that it costs milliseconds.
Arguments: the process id of the launcher, where stdout goes, where stderr goes ("": where the launcher's goes), and the
command.
"""

from __future__ import annotations

import os
import signal
import sys

_CANNOT_START = 127  # as shells say it
_PR_SET_PDEATHSIG = 1


def _redirect(path: str, descriptor: int) -> None:
    if path:
        # A terminal must not become the one that controls this process.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher is gone, even if that was killed. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        print(f"composer: cannot tie this rank to its launcher: errno {ctypes.get_errno()}", file=sys.stderr)
    if os.getppid() != launcher:  # it went before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    launcher, out, err, *command = sys.argv[1:]
    _redirect(out, 1)
    _redirect(err, 2)
    _die_with(int(launcher))
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what is ignored stays so in the new program
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"composer: cannot start {command[0]!r}: {error}", file=sys.stderr, flush=True)
        os._exit(_CANNOT_START)


if __name__ == "__main__":
    _main()
