"""Read, write and merge files in Chrome's Trace Event Format.

Not in `json_trace_merger`, which `python -m` runs: importing the package must not import it first.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TraceEvent = dict[str, Any]

# Our metadata events, which viewers ignore.
_RANK, _SYNC, _SHIFT, _ORIGIN = "global_rank", "clock_sync_timestamp_us", "clock_shift_us", "trace_origin"
_BACKWARD = "MulBackward0"  # runs in the thread of the backward pass
_LAST = 99999
_OF_PROCESS = frozenset({"process_name", "process_labels", "process_sort_index"})
_IDS = ("id", "id2", "bind_id")


def merge_traces(output_file: str | os.PathLike[str], *trace_files: str | os.PathLike[str]) -> None:
    """Merge traces into one file, which https://ui.perfetto.dev and chrome://tracing can open.

    Each rank becomes a process, and the threads of torch's profiler follow those of the markers. The times of each rank
    are shifted by the difference between its clock and that of the lowest rank, measured when all ranks left the same
    barrier. Times in the output are microseconds since the earliest event, to the nanosecond; the metadata event
    "trace_origin" holds the time of that event.

    Args:
        output_file: The file to write: a JSON array of events. It may be one of those that are read.
        *trace_files: What to merge: traces of a `JSONTraceHandler`, of a `TorchProfiler` (a dict with "traceEvents",
            "global_rank" and "clock_sync_timestamp_us") or results of this function; compressed if they end in ".gz".

    Raises:
        ValueError: There is nothing to merge, a file is not a trace, or its rank is unknown.

    Differs: traces of several cycles can be merged together, and each rank's clock is shifted by the same amount in all
    of them, so that nested spans stay nested. Torch's threads have separate rows, because its spans overlap the
    markers; ids of flows are made unique. A list with a trailing comma, or cut off, is read up to its last event.
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
    """The content of a trace file.

    Attributes:
        events: The events.
        rank: The rank of all events; None in a merged file, where the process of an event is its rank.
        reference: The rank whose clock gave the times.
        syncs: Pairs of the number of a barrier (-1 if unknown) and the time of that clock at the barrier.
        base_us: The origin of the times, in microseconds since 1970.
        own_rows: True if the threads need separate rows: those of torch's profiler.
        shifts: In a merged file, the shift that was applied to the times of each rank.
    """

    events: list[TraceEvent]
    rank: int | None
    reference: int
    syncs: set[tuple[int, int]] = field(default_factory=set)
    base_us: int = 0
    own_rows: bool = False
    shifts: dict[int, int] = field(default_factory=dict)

    def offset_us(self, shifts: Mapping[int, int]) -> int:
        """Return the offset that converts the times to the clock of the lowest rank."""
        return self.base_us - shifts.get(self.reference, 0)

    def begins_us(self, shifts: Mapping[int, int]) -> Iterator[int]:
        """Yield the time of the first event, if there is one."""
        times = [event["ts"] for event in self.events if _is_timed(event)]
        if times:
            yield int(min(times) // 1 + self.offset_us(shifts))


def _is_timed(event: TraceEvent) -> bool:
    return event.get("ph") != "M" and event.get("ts") is not None and _thread_of(event) is not None


def _thread_of(event: TraceEvent) -> tuple[Any, Any] | None:
    """Return the process and thread of an event; None if the event must be dropped."""
    pid, tid = event.get("pid"), event.get("tid")
    if pid in (None, "") or tid in (None, "") or "PyTorch Profiler" in str(tid):
        return None
    return pid, tid


def _source(path: str | os.PathLike[str]) -> _Source:
    content = read_trace(path)
    if isinstance(content, dict):
        rank = content.get("global_rank", (content.get("distributedInfo") or {}).get("rank"))
        if rank is None:
            raise ValueError(f"{os.fspath(path)} does not say which rank it is from: it has no 'global_rank'.")
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
        raise ValueError(f"{os.fspath(path)} does not say which rank it is from: no event has a number as its 'pid'.")
    return _Source(content, int(ranks[0]), int(ranks[0]), syncs)


def _shifts(sources: Sequence[_Source]) -> dict[int, int]:
    """Return by how much the clock of each rank is ahead of the clock of the lowest rank."""
    syncs: dict[int, set[tuple[int, int]]] = {}
    known: dict[int, int] = {}
    for source in sources:
        syncs.setdefault(source.reference, set()).update(source.syncs)
    lowest = min(syncs)
    for source in sources:
        if source.reference == lowest:
            known.update(source.shifts)
    shifts = {rank: known[rank] if rank in known else _ahead(own, syncs[lowest]) for rank, own in syncs.items()}
    for source in sources:  # all ranks of a merged file are shifted together
        for rank, shift in source.shifts.items():
            shifts.setdefault(rank, shift + shifts[source.reference])
    shifts[lowest] = 0
    return shifts


def _ahead(own: set[tuple[int, int]], lowest: set[tuple[int, int]]) -> int:
    pairs = sorted((n, time - reference) for n, time in own for m, reference in lowest if n == m and n >= 0)
    if pairs:
        return pairs[0][1]
    differences = [time - reference for _, time in own for _, reference in lowest]
    # Without numbers, the nearest times are assumed to belong to the same barrier.
    return min(differences, key=abs, default=0)


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
                name, args = event.get("name"), event.get("args") or {}
                event.pop("ts", None)
                if name == _SHIFT or (name == _SYNC and event["pid"] != self._reference):
                    continue
                number = (args.get("number", -1), args["value"]) if name == _SYNC else None
                self._facts[(name, event["pid"], event["tid"], number)] = event
            elif event.get("ts") is not None:
                time_us = round(event["ts"] + delta, 3)  # whole nanoseconds, the resolution of the clock
                event["ts"] = int(time_us) if time_us == int(time_us) else time_us
                self._timed.append(event)

    def _row(self, rank: int, thread: tuple[Any, Any], is_backward: bool) -> int:
        tid = self._rows.of(rank, thread)
        key = ("thread_sort_index", rank, tid, None)
        index = 1 if is_backward else self._facts[key]["args"]["sort_index"] if key in self._facts else _LAST
        self._facts[key] = metadata_event("thread_sort_index", rank, tid, sort_index=index)
        self._facts.setdefault(
            ("thread_name", rank, tid, None), metadata_event("thread_name", rank, tid, name=f"torch {thread[1]}")
        )
        of = ("thread_of", rank, tid, None)
        self._facts.setdefault(of, metadata_event("thread_of", rank, tid, pid=thread[0], tid=thread[1]))
        return tid

    def events(self, shifts: Mapping[int, int]) -> Iterable[TraceEvent]:
        """Yield all events: first those that describe ranks and threads, then the others by time."""
        tid = min((key[2] for key in self._facts if isinstance(key[2], int)), default=0)
        for rank in sorted({event["pid"] for event in self._timed}):
            if ("process_name", rank) not in {key[:2] for key in self._facts}:
                yield metadata_event("process_name", rank, tid, name=f"Rank {rank} training loop process")
                yield metadata_event("process_sort_index", rank, tid, sort_index=rank)
        args = {"unix_time_us": self._origin, "rank": self._reference}
        yield metadata_event(_ORIGIN, self._reference, tid, **args)
        for rank, shift in sorted(shifts.items()):
            yield metadata_event(_SHIFT, rank, tid, value=shift)
        yield from self._facts.values()
        yield from sorted(self._timed, key=lambda event: event["ts"])


class _Rows:
    """Assigns numbers to the threads of torch that no thread of the markers has."""

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
        """Return the number of a thread: its own if that is free."""
        key = (rank, *thread)
        if key not in self._numbers:
            used = self._used.setdefault(rank, set())
            number = thread[1] if isinstance(thread[1], int) and thread[1] >= 0 else 1
            while number in used:
                number += 1
            used.add(number)
            self._numbers[key] = number
        return self._numbers[key]


class _Ids:
    """Ids that connect events, unique among files: torch counts from 1 in each file."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        kept = [e[key] for s in sources if not s.own_rows for e in s.events for key in _IDS if _is_number(e.get(key))]
        self._next = max(kept, default=0) + 1
        self._new: dict[Any, int] = {}

    def next_file(self) -> None:
        """Start the next file."""
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


def metadata_event(name: str, pid: Any, tid: Any, /, **args: Any) -> TraceEvent:
    """Return an event that describes a process or a thread."""
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def read_trace(path: str | os.PathLike[str]) -> Any:
    """Read a trace file: a list of events, or a dict that holds them as "traceEvents".

    Args:
        path: The file; compressed if it ends in ".gz".

    Raises:
        ValueError: The file holds something else.
    """
    if str(path).endswith(".gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
    else:
        text = Path(path).read_text(encoding="utf-8")
    return parse_trace(text, os.fspath(path))


def parse_trace(text: str, name: str = "the trace") -> Any:
    """Parse a trace: a list of events, or a dict that holds them as "traceEvents".

    A list may lack its end, as the format allows: a comma may follow its last event, its bracket may be missing, and an
    incomplete last event is ignored.

    Args:
        text: JSON.
        name: The name of the trace, for messages.

    Raises:
        ValueError: The content is neither a list of events nor a dict with them.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):
            raise ValueError(f"{name} is not a trace: it is not JSON ({error}).") from error
        content = _whole_events(text)
    if isinstance(content, dict) and "traceEvents" not in content:
        raise ValueError(f"{name} is not a trace: its object has no 'traceEvents'.")
    events = content["traceEvents"] if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{name} is not a trace: it must hold a list of events, each of them an object.")
    return content


def _whole_events(text: str) -> list[Any]:
    """Return the complete values of a list that may be cut off."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return values
        values.append(value)


def write_trace(path: Path, events: Iterable[TraceEvent]) -> None:
    """Write a list of events, one per line. The file is renamed to `path` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a file can be renamed within a folder
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write("[\n")
            file.write(",\n".join(json.dumps(event) for event in events))
            file.write("\n]\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
