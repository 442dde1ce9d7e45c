"""The processes of this node: start them, watch them, end them all when one fails, and report the cause."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

from composer.cli._output import Outputs, print_message
from composer.cli._plan import Plan
from composer.cli._signals import Signals

_POLL_SECONDS = 0.1
_CAUSE_SECONDS = 1.5  # how long to wait for the failure that caused the first one
_GRACE_SECONDS = 3.0  # short: a rank that lost another one cannot finish its batch
_KILL_SECONDS = 5  # a killed process ends immediately, unless it hangs in the kernel

# Messages of a rank that only noticed that another one is gone.
_CONSEQUENCE = re.compile(
    r"LostRankError|Connection (closed|reset) by peer|[Bb]roken pipe|Timed out waiting|gloo/transport|"
    r"Dist(Backend|Network|Store)Error|ncclRemoteError|ncclSystemError|Watchdog caught collective operation timeout"
)
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")


@dataclass(frozen=True)
class ExitedRank:
    """A rank whose process has exited.

    Attributes:
        rank: Global rank.
        pid: Process id.
        code: Return code of `subprocess`: negative if a signal killed the process.
        time: When the launcher noticed, in seconds.
        tail: The last lines of its stderr.
        log: The file with its stderr. None: it was shown on the console.
        sent_signal: The signal that the launcher had sent before; 0: none.
    """

    rank: int
    pid: int
    code: int
    time: float
    tail: Sequence[str]
    log: str | None
    sent_signal: int = 0

    @property
    def failed(self) -> bool:
        """True if it exited with an error that is not the effect of a signal from the launcher."""
        if self.code == 0:
            return False
        return not self.sent_signal or exit_status(self.code) != 128 + self.sent_signal

    @property
    def is_consequence(self) -> bool:
        """True if it failed because another rank was gone."""
        if self.code < 0 and self.code != -signal.SIGABRT:  # NCCL's watchdog aborts a process that waits for another
            return False
        errors = [index for index, line in enumerate(self.tail) if _ERROR_LINE.match(line)]
        # Only the last error counts; those above it led to it.
        return any(_CONSEQUENCE.search(line) for line in self.tail[errors[-1] if errors else 0 :])


def exit_status(code: int) -> int:
    """Return the exit status for a return code of `subprocess`: 128 + n if signal n killed the process."""
    return 128 - code if code < 0 else code


def root_cause(failures: Collection[ExitedRank]) -> ExitedRank:
    """Return the first failure that is not the consequence of another one, or else the first failure.

    A rank whose stderr is the console may have failed because of another one; it is named if no other one is.
    """
    return min(failures, key=lambda exited: (exited.is_consequence, exited.log is None, exited.time, exited.rank))


def describe(code: int) -> str:
    """Return a description of a return code of `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Job:
    """The ranks of this node, from their start until the last one has exited.

    Args:
        plan: What to start.
        environment: The environment of the launcher.
        outputs: Collects the output of the ranks.
        signals: The signals that the launcher received.
    """

    def __init__(self, plan: Plan, environment: Mapping[str, str], outputs: Outputs, signals: Signals) -> None:
        self._plan, self._outputs, self._signals = plan, outputs, signals
        self._exited: dict[int, ExitedRank] = {}
        self._sent: dict[int, int] = {}
        script = str(Path(__file__).with_name("_rank.py"))
        arguments = {
            rank: ("-I", "-S", script, str(os.getpid()), *outputs.paths(rank), *plan.expanded(rank, environment))
            for rank in range(plan.nproc)
        }
        variables = {rank: plan.variables(rank, environment) for rank in range(plan.nproc)}
        self._context: PContext = start_processes("rank", sys.executable, arguments, variables, _NoLogFiles())
        self._processes: dict[int, Any] = {
            rank: handler.proc
            for rank, handler in self._context.subprocess_handlers.items()  # type: ignore[attr-defined]  # of a subclass
        }

    def run(self) -> int:
        """Wait until all ranks have exited, and end them all if one fails.

        Returns:
            The exit status of the launcher.
        """
        try:
            self._watch()
        finally:
            for rank in self._running():
                self._sent[rank] = signal.SIGKILL
            self._context.close(signal.SIGKILL, _KILL_SECONDS)  # kills the running ranks with all their children
            self._running()
        self._outputs.finish()
        return self._report()

    def _watch(self) -> None:
        """Forward signals to the ranks, until all have exited or those that run must be killed."""
        deadline, timeout = float("inf"), self._plan.shutdown_timeout
        while self._running():
            number = self._signals.take()
            if number is not None:
                if self._sent:
                    return  # the second signal: kill now
                print_message(
                    f"{signal.Signals(number).name} is forwarded to the ranks, which have {timeout:g} s to save and "
                    f"exit. Send it again to kill them immediately."
                )
                self._send(number)
                deadline = time.monotonic() + timeout
            failures = self._failures()
            if failures:
                first = min(exited.time for exited in failures)
                caused = all(exited.is_consequence or exited.log is None for exited in failures)
                if not caused or time.monotonic() > first + _CAUSE_SECONDS:
                    self._terminate()
                    return
            if time.monotonic() > deadline:
                print_message(f"{len(self._running())} ranks did not exit within {timeout:g} s and are killed.")
                return
            time.sleep(_POLL_SECONDS)

    def _terminate(self) -> None:
        """Send SIGTERM to the running ranks and wait a short time."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._running() and time.monotonic() < deadline and not self._signals.pending:
            time.sleep(_POLL_SECONDS)

    def _send(self, number: int) -> None:
        # Only to the ranks, not to their process groups: data loader workers would exit, and their ranks fail.
        for rank in self._running():
            self._sent[rank] = number
            self._processes[rank].send_signal(number)

    def _running(self) -> list[int]:
        """Return the local ranks that are running, and record those that have exited."""
        now = time.monotonic()
        for rank, process in self._processes.items():
            if rank not in self._exited and process.poll() is not None:
                if process.returncode:
                    with suppress(ProcessLookupError, PermissionError):  # no children left; macOS: an exited process
                        os.killpg(process.pid, signal.SIGKILL)
                self._exited[rank] = ExitedRank(
                    rank=self._plan.base_rank + rank,
                    pid=process.pid,
                    code=process.returncode,
                    time=now,
                    tail=self._outputs.tail(rank) if process.returncode else (),
                    log=self._outputs.log(rank),
                    sent_signal=self._sent.get(rank, 0),
                )
        return [rank for rank in self._processes if rank not in self._exited]

    def _failures(self) -> list[ExitedRank]:
        return [exited for exited in self._exited.values() if exited.failed]

    def _report(self) -> int:
        """Print the cause of a failure and return the exit status."""
        codes = [exited.code for exited in sorted(self._exited.values(), key=lambda exited: exited.time) if exited.code]
        failures = self._failures()
        if not failures:
            return exit_status(codes[0]) if codes else 0
        cause = root_cause(failures)
        if cause.log is not None:
            tail = [f"  | {line}" for line in cause.tail] or ["  | (nothing)"]
            print_message(f"the last lines of stderr of rank {cause.rank} ({cause.log}):", *tail)
        for rank, exited in sorted(self._exited.items()):
            if exited is not cause and (description := self._describe_other(rank)):
                print_message(description)
        rest = " The other ranks were ended." if self._sent else ""
        host = socket.gethostname()
        print_message(f"rank {cause.rank} on host {host} (pid {cause.pid}) failed: {describe(cause.code)}.{rest}")
        return exit_status(cause.code)

    def _describe_other(self, rank: int) -> str:
        """Describe how a rank that is not the cause ended; "" if SIGTERM was enough."""
        exited = self._exited[rank]
        log = "" if exited.log is None else f"; see {exited.log}"
        if exited.failed:
            return f"rank {exited.rank} failed too: {describe(exited.code)}{log}"
        if exited.sent_signal == signal.SIGKILL:
            return f"rank {exited.rank} (pid {exited.pid}) did not exit after SIGTERM, and was killed{log}"
        return "" if exited.sent_signal else f"rank {exited.rank} had finished with exit code 0{log}"


class _NoLogFiles(LogsSpecs):
    """Leaves redirection to `_rank.py`: torch would overwrite existing files."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(dict.fromkeys(envs, ""), dict.fromkeys(envs, ""), {}, {}, dict.fromkeys(envs, ""))
