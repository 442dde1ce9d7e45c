"""The processes of this node: started and ended by torch's elastic multiprocessing, watched from here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

from composer.cli._failures import Ended, describe, is_consequence, root_cause, status_of, summary
from composer.cli._output import Outputs, tell
from composer.cli._plan import Plan
from composer.cli._signals import Signals

__all__ = ["Job"]

_POLL_SECONDS = 0.1
_HINDSIGHT_SECONDS = 1.5  # how long to wait for the failure that another one followed from
_GRACE_SECONDS = 3.0  # a rank whose partner is gone can finish no batch
_KILLED_SECONDS = 5  # a killed process is gone at once, unless it hangs in the kernel


class Job:
    """The ranks of this node, from their start until the last of them has ended.

    Args:
        plan: What to start.
        environment: What the launcher was started with.
        outputs: Takes what they write.
        signals: What the launcher was told.
    """

    def __init__(self, plan: Plan, environment: Mapping[str, str], outputs: Outputs, signals: Signals) -> None:
        self._plan, self._outputs, self._signals = plan, outputs, signals
        self._ended: dict[int, Ended] = {}
        self._told: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._context = _start(plan, environment, outputs)
        self._processes: dict[int, Any] = {
            rank: handler.proc
            for rank, handler in self._context.subprocess_handlers.items()  # type: ignore[attr-defined]  # of programs
        }

    def run(self) -> int:
        """Wait until all have ended, or end them when one fails.

        Returns:
            The exit status.
        """
        try:
            self._watch()
        finally:
            self._kill()
        self._outputs.finish()
        return self._conclude()

    def _watch(self) -> None:
        deadline = float("inf")
        while self._running():
            number = self._signals.take()
            if number is not None:
                if self._told:
                    return  # asked again: without patience
                self._pass_on(number)
                deadline = time.monotonic() + self._plan.shutdown_timeout
            failures = self._failures()
            if failures:
                first = min(ended.time for ended in failures)
                if not all(map(is_consequence, failures)) or time.monotonic() > first + _HINDSIGHT_SECONDS:
                    self._end_rest()
                    return
            if time.monotonic() > deadline:
                tell(f"composer: {len(self._running())} ranks did not leave in {self._plan.shutdown_timeout:g} s.")
                return
            time.sleep(_POLL_SECONDS)

    def _pass_on(self, number: int) -> None:
        name, seconds = signal.Signals(number).name, self._plan.shutdown_timeout
        tell(
            f"composer: {name} is passed on to the ranks, which may take {seconds:g} s to save and leave; send it "
            f"again to end them at once."
        )
        self._send(number)

    def _end_rest(self) -> None:
        """Ask those that run to leave, for a short while."""
        self._stopped = {rank for rank in self._running() if _is_stopped(self._processes[rank].pid)}
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        # One that is stopped cannot leave by itself.
        while set(self._running()) - self._stopped and time.monotonic() < deadline and not self._signals.waiting:
            time.sleep(_POLL_SECONDS)

    def _send(self, number: int) -> None:
        # To the ranks alone: their loaders' workers would die of it, and the ranks of that.
        for rank in self._running():
            self._told[rank] = number
            self._processes[rank].send_signal(number)

    def _kill(self) -> None:
        """End what still runs, with all its children."""
        for rank in self._running():
            self._told[rank] = signal.SIGKILL
        self._context.close(signal.SIGKILL, _KILLED_SECONDS)
        self._running()

    def _running(self) -> list[int]:
        """The local ranks that run; notes those that have ended."""
        now = time.monotonic()
        for rank, process in self._processes.items():
            if rank not in self._ended and process.poll() is not None:
                if process.returncode:
                    _kill_children(process.pid)
                tail = self._outputs.tail(rank) if process.returncode else ()
                self._ended[rank] = Ended(
                    rank=self._plan.base_rank + rank,
                    pid=process.pid,
                    code=process.returncode,
                    time=now,
                    tail=tail,
                    log=self._outputs.log(rank),
                    told=self._told.get(rank, 0),
                )
        return [rank for rank in self._processes if rank not in self._ended]

    def _failures(self) -> list[Ended]:
        return [ended for ended in self._ended.values() if ended.failed]

    def _conclude(self) -> int:
        codes = [ended.code for ended in sorted(self._ended.values(), key=lambda ended: ended.time) if ended.code]
        failures = self._failures()
        if not failures:
            return status_of(codes[0]) if codes else 0
        cause = root_cause(failures)
        others = [self._fate(rank) for rank, ended in sorted(self._ended.items()) if ended is not cause]
        tell(*summary(cause, [fate for fate in others if fate], ended=bool(self._told)))
        return status_of(cause.code)

    def _fate(self, rank: int) -> str:
        """What is worth telling about a rank that was not the first to fail; "": nothing."""
        ended = self._ended[rank]
        if rank in self._stopped:
            return f"rank {ended.rank} (pid {ended.pid}) did not answer: it was stopped (SIGSTOP), and was killed."
        log = "" if ended.log is None else f"; see {ended.log}"
        if ended.failed:
            return f"rank {ended.rank} failed too: {describe(ended.code)}{log}"
        if ended.told == signal.SIGKILL:
            return f"rank {ended.rank} (pid {ended.pid}) did not leave when it was told to, and was killed{log}"
        return "" if ended.told else f"rank {ended.rank} had left with exit code 0{log}"


class _NoFiles(LogsSpecs):
    """Leaves output to the ranks: torch would overwrite what is in a file already."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(dict.fromkeys(envs, ""), dict.fromkeys(envs, ""), {}, {}, dict.fromkeys(envs, ""))


def _start(plan: Plan, environment: Mapping[str, str], outputs: Outputs) -> PContext:
    first = str(Path(__file__).with_name("_rank.py"))
    ranks = range(plan.nproc)
    arguments = {
        rank: ("-I", "-S", first, str(os.getpid()), *outputs.paths(rank), *plan.expanded(rank, environment))
        for rank in ranks
    }
    variables = {rank: plan.variables(rank, environment) for rank in ranks}
    return start_processes("rank", sys.executable, arguments, variables, _NoFiles())


def _kill_children(pid: int) -> None:
    """End what a process left behind in its group, of which it was the first."""
    with suppress(ProcessLookupError, PermissionError):  # nothing, or on macOS a process that has ended
        os.killpg(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no Linux, or it has just ended
        return False
    return state in ("T", "t")
