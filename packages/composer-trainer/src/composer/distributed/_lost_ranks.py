"""Name the missing rank when communication between ranks fails."""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from composer.core import ComposerError

# Messages of gloo, NCCL and the store. Gloo's errors have no class of their own.
_COMMUNICATION = re.compile(r"gloo/|Connection (closed|reset) by peer|Timed out waiting|Broken pipe|NCCL error")
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
_TIMED_OUT_SECONDS = 3.0  # how long to wait for notes after a timeout: other ranks time out at nearly the same time
_CLOSED_SECONDS = 1.0  # how long to wait for notes after a closed connection: a failing rank writes its note first
_HANGING_SECONDS = 2.0  # more, after which the store is considered gone
_POLL_SECONDS = 0.05
_NOTE_LENGTH = 500


class LostRankError(ComposerError, RuntimeError):
    """Another rank does not answer, has exited or has failed, so this rank cannot continue."""


class LostRankDetector:
    """Names the missing ranks when communication fails. Costs nothing as long as none fails.

    Each failing rank writes a note to the store of the process group; a rank without a note is missing.

    Args:
        rank: This process.
        world_size: The number of processes.
        timeout: Seconds until communication fails.
    """

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._round, self._active = 0, False
        self.name = ""  # distinguishes the notes of different Trainers; the same on all ranks
        self.lost = False  # a rank is missing

    @contextmanager
    def report(self) -> Iterator[None]:
        """Return a context for code that communicates, entered by all ranks. Its errors are reported to the others.

        Raises:
            LostRankError: Communication failed, and the missing rank is known.
        """
        if self._active:  # the outer context reports
            yield
            return
        self._active = True
        self._round += 1  # ignores notes of earlier failures that the program has handled
        try:
            yield
        except BaseException as error:
            if not is_communication_error(error):
                first_line = "".join(traceback.format_exception_only(type(error), error)).partition("\n")[0]
                self._exchange_notes(f"failed {first_line}"[:_NOTE_LENGTH], 0.0)
                raise
            timed_out = _TIMEOUT.search(str(error)) is not None
            seconds = _TIMED_OUT_SECONDS if timed_out else _CLOSED_SECONDS
            notes = self._exchange_notes(f"waits {'timed out' if timed_out else ''}", seconds)
            message = self._message(notes, timed_out)
            if message is None:
                raise
            self.lost = True
            raise LostRankError(message) from error
        finally:
            self._active = False

    def _message(self, notes: Mapping[int, str] | None, timed_out: bool) -> str | None:
        """Return which ranks are missing and what to do; None if no rank is missing."""
        local = self._rank
        if notes is None:
            return (
                f"Rank 0, which hosts the store, has exited or does not answer, so rank {local} cannot continue. "
                f"See the log of rank 0 for the reason."
            )
        failed = {rank: note.partition(" ")[2] for rank, note in notes.items() if note.startswith("failed")}
        if failed:
            rank, reason = min(failed.items())
            return f"Rank {rank} failed while rank {local} waited for it, with {reason}. See the log of rank {rank}."
        missing = [rank for rank in range(self._world_size) if rank != local and rank not in notes]
        if not missing:
            return None
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        singular = len(missing) == 1
        if timed_out or any("timed out" in note for note in notes.values()):
            return (
                f"{who} {'has' if singular else 'have'} not answered for {self._timeout:g} s, so rank {local} "
                f"cannot continue. {'It' if singular else 'They'} may be suspended, hung or slow: see "
                f"{'its log' if singular else 'their logs'}, or increase `dist_timeout`."
            )
        return (
            f"{who} {'is' if singular else 'are'} gone: the connection was closed while rank {local} waited. See "
            f"the log of {who.lower()} for the reason."
        )

    def _exchange_notes(self, note: str, seconds: float) -> dict[int, str] | None:
        """Write a note, and wait some seconds for the notes of other ranks; None: the store does not answer."""
        notes: dict[int, str] = {}
        answered = threading.Event()

        def exchange() -> None:
            try:
                self._write_and_read(note, notes, seconds)
            except RuntimeError:  # the store is gone, or has no such operation
                return
            answered.set()

        # The store may hang as well: its process may be stopped.
        thread = threading.Thread(target=exchange, name="composer-lost-ranks", daemon=True)
        thread.start()
        thread.join(seconds + _HANGING_SECONDS)
        return notes if answered.is_set() else None

    def _write_and_read(self, note: str, notes: dict[int, str], seconds: float) -> None:
        store = _store()
        keys = {rank: f"composer/lost/{self.name}/{self._round}/{rank}" for rank in range(self._world_size)}
        store.set(keys[self._rank], note)
        deadline = time.monotonic() + seconds
        while len(notes) < self._world_size and time.monotonic() < deadline:
            for rank, key in keys.items():
                if rank not in notes and store.check([key]):
                    notes[rank] = store.get(key).decode(errors="replace")
            if any(text.startswith("failed") for text in notes.values()):
                return
            time.sleep(_POLL_SECONDS)


def is_communication_error(error: BaseException) -> bool:
    """Return True if an error comes from communication between ranks."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None


def _store() -> Any:
    """Return the store of the `composer` launcher, which outlives any rank, or that of the process group."""
    host, _, port = os.environ.get("COMPOSER_LAUNCHER_STORE", "").rpartition(":")
    if host:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

        return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    return torch.distributed.distributed_c10d._get_default_store()
