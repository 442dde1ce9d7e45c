"""Merges traces of several ranks, and several traces of one rank, into one timeline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.profiler._trace_files import TraceEvent, read_trace, write_trace

__all__ = ["merge_traces"]

# Metadata events of our own; viewers ignore what they do not know.
_RANK, _SYNC, _SHIFT, _ORIGIN = "global_rank", "clock_sync_timestamp_us", "clock_shift_us", "trace_origin"
_BACKWARD = "MulBackward0"  # runs in the thread of the backward pass
_LAST = 99999
_OF_PROCESS = frozenset({"process_name", "process_labels", "process_sort_index"})
_IDS = ("id", "id2", "bind_id")


def merge_traces(output_file: str | os.PathLike[str], *trace_files: str | os.PathLike[str]) -> None:
    """Merge traces into one, which https://ui.perfetto.dev and chrome://tracing can open.

    Each rank becomes a process of its own, and the threads of torch's profiler follow those of the markers. The clock
    of each rank is moved by as much as it differed from that of the lowest rank when all ranks left one barrier. Times
    in the output are microseconds since the earliest event, to the nanosecond; the metadata event "trace_origin" holds
    when that was.

    Args:
        output_file: The file to write: a JSON array of events. It may be one of those that are read.
        *trace_files: What to merge: traces of a `JSONTraceHandler`, of a `TorchProfiler` (a dict with "traceEvents",
            "global_rank" and "clock_sync_timestamp_us") or results of this function; compressed if they end in ".gz".

    Raises:
        ValueError: There is nothing to merge, or a file is no trace or does not tell of which rank it is.

    Differs: traces of several cycles can be merged at once, and each rank's clock is moved by the same amount in all
    of them, so that what was nested stays nested. Torch's threads get rows of their own, because its spans overlap the
    markers; ids of flows are made unique. A list with a comma at its end, or cut off, is read as far as it goes.
    """
    if not trace_files:
        raise ValueError("`trace_files` must name at least one trace, got none.")
    sources = [_source(path) for path in trace_files]
    shifts = _shifts(sources)
    origin = min((t for source in sources for t in source.begins_us(shifts)), default=0)
    merged = _Merged(sources, origin)
    for source in sources:
        merged.add(source, shifts)
    write_trace(Path(output_file), merged.events(shifts))


@dataclass
class _Source:
    """One file.

    Attributes:
        events: Its events.
        rank: Whose they are; None: each one's process is its rank, because the file is a merged one.
        reference: The rank whose clock the times are of.
        syncs: What that clock showed at barriers, each with its number; -1 for a barrier without one.
        base_us: When, since 1970, the times begin.
        own_rows: Whether threads need rows of their own.
        shifts: By how much the clock of each rank was moved already, in a merged file.
    """

    events: list[TraceEvent]
    rank: int | None
    reference: int
    syncs: set[tuple[int, int]] = field(default_factory=set)
    base_us: int = 0
    own_rows: bool = False
    shifts: dict[int, int] = field(default_factory=dict)

    def offset_us(self, shifts: Mapping[int, int]) -> int:
        """What to add to its times to have them on the clock of the lowest rank."""
        return self.base_us - shifts.get(self.reference, 0)

    def begins_us(self, shifts: Mapping[int, int]) -> Iterator[int]:
        """When its first event happens."""
        times = [event["ts"] for event in self.events if _is_timed(event)]
        if times:
            yield int(min(times) // 1 + self.offset_us(shifts))


def _is_timed(event: TraceEvent) -> bool:
    return event.get("ph") != "M" and event.get("ts") is not None and _thread_of(event) is not None


def _thread_of(event: TraceEvent) -> tuple[Any, Any] | None:
    """The process and thread of an event; None if the event is to be dropped."""
    pid, tid = event.get("pid"), event.get("tid")
    if pid in (None, "") or tid in (None, "") or "PyTorch Profiler" in str(tid):
        return None
    return pid, tid


def _source(path: str | os.PathLike[str]) -> _Source:
    content = read_trace(path)
    if isinstance(content, dict):
        rank = content.get("global_rank", (content.get("distributedInfo") or {}).get("rank"))
        if rank is None:
            raise ValueError(f"{os.fspath(path)} does not tell of which rank it is: it has no 'global_rank'.")
        syncs = set()
        if _SYNC in content:
            syncs.add((int(content.get("clock_sync_number", -1)), int(content[_SYNC])))
        base = int(content.get("baseTimeNanoseconds", 0)) // 1000  # whole seconds: an integer loses nothing
        return _Source(content["traceEvents"], int(rank), int(rank), syncs, base, own_rows=True)
    facts = [event for event in content if event.get("ph") == "M"]
    syncs = {(int(f["args"].get("number", -1)), int(f["args"]["value"])) for f in facts if f.get("name") == _SYNC}
    for fact in facts:
        if fact.get("name") == _ORIGIN:
            moved = {int(f["pid"]): int(f["args"]["value"]) for f in facts if f.get("name") == _SHIFT}
            args = fact["args"]
            return _Source(content, None, int(args["rank"]), syncs, int(args["unix_time_us"]), shifts=moved)
    ranks = [f["args"]["value"] for f in facts if f.get("name") == _RANK]
    ranks = ranks or [event["pid"] for event in content if isinstance(event.get("pid"), int)]
    if not ranks:
        raise ValueError(f"{os.fspath(path)} does not tell of which rank it is: no event has a number as its 'pid'.")
    return _Source(content, int(ranks[0]), int(ranks[0]), syncs)


def _shifts(sources: Sequence[_Source]) -> dict[int, int]:
    """By how much the clock of each rank is ahead of that of the lowest one."""
    syncs: dict[int, set[tuple[int, int]]] = {}
    known: dict[int, int] = {}
    for source in sources:
        syncs.setdefault(source.reference, set()).update(source.syncs)
    lowest = min(syncs)
    for source in sources:
        if source.reference == lowest:
            known.update(source.shifts)
    shifts = {rank: known[rank] if rank in known else _ahead(own, syncs[lowest]) for rank, own in syncs.items()}
    for source in sources:  # a merged file moves as a whole
        for rank, shift in source.shifts.items():
            shifts.setdefault(rank, shift + shifts[source.reference])
    shifts[lowest] = 0
    return shifts


def _ahead(own: set[tuple[int, int]], lowest: set[tuple[int, int]]) -> int:
    pairs = sorted((n, mine - theirs) for n, mine in own for m, theirs in lowest if n == m and n >= 0)
    if pairs:
        return pairs[0][1]
    differences = [mine - theirs for _, mine in own for _, theirs in lowest]
    return min(differences, key=abs, default=0)  # of barriers without a number, those nearest are taken to be one


class _Merged:
    """The merged trace."""

    def __init__(self, sources: Sequence[_Source], origin_us: int) -> None:
        self._origin = origin_us
        self._reference = min(source.reference for source in sources)
        self._ids = _Ids(sources)
        self._facts: dict[tuple[Any, ...], TraceEvent] = {}
        self._timed: list[TraceEvent] = []
        self._rows = _Rows(sources)

    def add(self, source: _Source, shifts: Mapping[int, int]) -> None:
        """Add the events of a file."""
        delta = source.offset_us(shifts) - self._origin
        backward = {_thread_of(e) for e in source.events if e.get("name") == _BACKWARD} if source.own_rows else set()
        self._ids.next_file()
        for event in source.events:
            thread = _thread_of(event)
            if thread is None or event.get("name") == _ORIGIN:
                continue
            event = dict(event)
            if source.own_rows:
                assert source.rank is not None
                if event.get("ph") == "M" and event.get("name") in (*_OF_PROCESS, "thread_sort_index"):
                    continue
                event["tid"] = self._row(source.rank, thread, thread in backward)
                self._ids.make_unique(event)
            event["pid"] = source.rank if source.rank is not None else thread[0]
            if event.get("ph") == "M":
                self._add_fact(event)
            elif event.get("ts") is not None:
                event["ts"] = _rounded(event["ts"] + delta)
                self._timed.append(event)

    def _row(self, rank: int, thread: tuple[Any, Any], is_backward: bool) -> int:
        tid = self._rows.of(rank, thread)
        key = ("thread_sort_index", rank, tid, None)
        index = 1 if is_backward else self._facts[key]["args"]["sort_index"] if key in self._facts else _LAST
        self._facts[key] = _fact("thread_sort_index", rank, tid, sort_index=index)
        self._facts.setdefault(
            ("thread_name", rank, tid, None), _fact("thread_name", rank, tid, name=f"torch {thread[1]}")
        )
        of = ("thread_of", rank, tid, None)
        self._facts.setdefault(of, _fact("thread_of", rank, tid, pid=thread[0], tid=thread[1]))
        return tid

    def _add_fact(self, event: TraceEvent) -> None:
        name, args = event.get("name"), event.get("args") or {}
        event.pop("ts", None)
        number = (args.get("number", -1), args["value"]) if name == _SYNC else None
        if (name == _SYNC and event["pid"] != self._reference) or name == _SHIFT:
            return
        self._facts[(name, event["pid"], event["tid"], number)] = event

    def events(self, shifts: Mapping[int, int]) -> Iterable[TraceEvent]:
        """All events: first those about ranks and threads, then the others in the order of their times."""
        tid = min((key[2] for key in self._facts if isinstance(key[2], int)), default=0)
        for rank in sorted({event["pid"] for event in self._timed}):
            if ("process_name", rank) not in {key[:2] for key in self._facts}:
                yield _fact("process_name", rank, tid, name=f"Rank {rank} training loop process")
                yield _fact("process_sort_index", rank, tid, sort_index=rank)
        args = {"unix_time_us": self._origin, "rank": self._reference}
        yield _fact(_ORIGIN, self._reference, tid, **args)
        for rank, shift in sorted(shifts.items()):
            yield _fact(_SHIFT, rank, tid, value=shift)
        yield from self._facts.values()
        yield from sorted(self._timed, key=lambda event: event["ts"])


class _Rows:
    """Numbers the threads of torch, so that none is also one of the markers."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._numbers: dict[tuple[int, Any, Any], int] = {}
        self._used: dict[int, set[int]] = {}
        for source in sources:
            if source.own_rows:
                continue
            for event in source.events:
                thread = _thread_of(event)
                if thread is None:
                    continue
                rank = source.rank if source.rank is not None else thread[0]
                if isinstance(thread[1], int):
                    self._used.setdefault(rank, set()).add(thread[1])
                if event.get("name") == "thread_of":
                    args = event["args"]
                    self._numbers[(rank, args["pid"], args["tid"])] = thread[1]

    def of(self, rank: int, thread: tuple[Any, Any]) -> int:
        """The number of a thread: its own if that is free."""
        key = (rank, *thread)
        if key not in self._numbers:
            used = self._used.setdefault(rank, set())
            wanted = thread[1] if isinstance(thread[1], int) and thread[1] >= 0 else 1
            while wanted in used:
                wanted += 1
            used.add(wanted)
            self._numbers[key] = wanted
        return self._numbers[key]


class _Ids:
    """Makes what connects events unique among files: torch counts from 1 in each of them."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        kept = [e[key] for s in sources if not s.own_rows for e in s.events for key in _IDS if _is_number(e.get(key))]
        self._next = max(kept, default=0) + 1
        self._new: dict[Any, int] = {}

    def next_file(self) -> None:
        """What comes from now on is of another file."""
        self._new = {}

    def make_unique(self, event: TraceEvent) -> None:
        """Replace the ids of an event."""
        for key in _IDS:
            value = event.get(key)
            if isinstance(value, (int, str)):
                if value not in self._new:
                    self._new[value] = self._next
                    self._next += 1
                event[key] = self._new[value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rounded(time_us: float) -> float:
    """To the nanosecond, which is what is measured; whole microseconds stay integers."""
    rounded = round(time_us, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _fact(name: str, pid: Any, tid: Any, /, **args: Any) -> TraceEvent:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
