"""How ranks ended: which of them failed first, and why."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Ended", "describe", "is_consequence", "root_cause", "status_of", "summary"]

# What is written by a rank that only noticed that another one is missing.
_CONSEQUENCE = re.compile(
    r"LostRankError|Connection (closed|reset) by peer|[Bb]roken pipe|Timed out waiting|gloo/transport|"
    r"Dist(Backend|Network|Store)Error|ncclRemoteError|ncclSystemError|Watchdog caught collective operation timeout"
)
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
_OWN_ENDS = (signal.SIGABRT,)  # how NCCL's watchdog ends a process that waits for another one


@dataclass(frozen=True)
class Ended:
    """A rank that has ended.

    Attributes:
        rank: Its global rank.
        pid: Its process.
        code: As `subprocess` gives it: negative if it was killed by a signal.
        time: When it was noticed, in seconds.
        tail: The last lines that it wrote to stderr.
        log: The file with all of them; None: they were shown.
        told: The signal that the launcher had sent it before; 0: none.
    """

    rank: int
    pid: int
    code: int
    time: float
    tail: Sequence[str]
    log: str | None
    told: int = 0

    @property
    def failed(self) -> bool:
        """Whether it ended badly, and not because it was told to end."""
        if self.code == 0:
            return False
        return not self.told or status_of(self.code) != 128 + self.told


def status_of(code: int) -> int:
    """The exit status that stands for the end of a process: 128 + the number of the signal that killed it."""
    return 128 - code if code < 0 else code


def is_consequence(ended: Ended) -> bool:
    """Whether a rank failed because it missed another one."""
    if ended.code < 0 and -ended.code not in _OWN_ENDS:
        return False
    errors = [index for index, line in enumerate(ended.tail) if _ERROR_LINE.match(line)]
    # The last error counts; those above are what led to it.
    return any(_CONSEQUENCE.search(line) for line in ended.tail[errors[-1] if errors else 0 :])


def root_cause(failures: Collection[Ended]) -> Ended:
    """The failure that the others follow from: the first one that is no consequence, else the first."""
    return min(failures, key=lambda ended: (is_consequence(ended), ended.time, ended.rank))


def describe(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"


def summary(cause: Ended, others: Sequence[str], ended: bool) -> list[str]:
    """The last lines of a job that failed.

    Args:
        cause: The rank that failed first.
        others: What is known about the other ranks, a line each.
        ended: Whether others were ended because of it.
    """
    title = f"composer: the last lines that rank {cause.rank} wrote to stderr"
    lines = [f"{title}{'' if cause.log is None else f' ({cause.log})'}:"]
    lines += [f"  | {line}" for line in cause.tail] or ["  | (nothing)"]
    lines += [f"composer: {other}" for other in others]
    host = socket.gethostname()
    rest = " The other ranks were ended." if ended else ""
    lines.append(f"composer: rank {cause.rank} on host {host} (pid {cause.pid}) failed: {describe(cause.code)}.{rest}")
    return lines
