"""The first script of each process: it redirects the output and is then replaced by the user's program.

It runs as a file and imports only the standard library, so that it takes milliseconds.
Arguments: the process id of the launcher, the files for stdout and stderr ("": inherited), the command.
"""

from __future__ import annotations

import os
import signal
import sys

_CANNOT_START = 127  # the same as in shells
_PR_SET_PDEATHSIG = 1


def _redirect(path: str, descriptor: int) -> None:
    if path:
        # O_NOCTTY: a terminal must not become the controlling one of this process.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _die_with(launcher: int) -> None:
    """Make the kernel kill this process when the launcher exits, even by SIGKILL. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        print(f"composer: cannot tie this rank to its launcher: errno {ctypes.get_errno()}", file=sys.stderr)
    if os.getppid() != launcher:  # it exited before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    launcher, out, err, *command = sys.argv[1:]
    _redirect(out, 1)
    _redirect(err, 2)
    _die_with(int(launcher))
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and exec preserves that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"composer: cannot start {command[0]!r}: {error}", file=sys.stderr, flush=True)
        os._exit(_CANNOT_START)


if __name__ == "__main__":
    _main()
