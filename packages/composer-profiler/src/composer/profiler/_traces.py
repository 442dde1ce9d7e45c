"""Read, write and merge files in Chrome's Trace Event Format.

Not in `json_trace_merger`, which `python -m` runs: importing the package must not import it first.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

TraceEvent = dict[str, Any]

# Our metadata events, which viewers ignore.
_RANK, _SYNC, _ORIGIN = "global_rank", "clock_sync_timestamp_us", "trace_origin"
_BACKWARD = "MulBackward0"  # runs in the thread of the backward pass
_LAST = 99999
_OF_PROCESS = frozenset({"process_name", "process_labels", "process_sort_index", "thread_sort_index"})
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
    markers; ids of flows are made unique.
    """
    if not trace_files:
        raise ValueError("`trace_files` must name at least one trace, got none.")
    sources = [_source(path) for path in trace_files]
    lowest = min(source.reference for source in sources)
    syncs: dict[int, dict[int, int]] = {}
    for source in sources:
        for rank, times in source.syncs.items():
            syncs.setdefault(rank, {}).update(times)
    for source in sources:
        # The first common barrier for all files: a shift that changed would take spans out of those around them.
        own, other = syncs.get(source.reference, {}), syncs.get(lowest, {})
        common = min(own.keys() & other.keys(), default=None)
        source.offset_us -= 0 if common is None else own[common] - other[common]
    begins = [
        event["ts"] // 1 + s.offset_us for s in sources for event in s.events if event["ph"] != "M" and "ts" in event
    ]
    origin = int(min(begins, default=0))
    kept = [e[key] for s in sources if not s.is_torch for e in s.events for key in _IDS if isinstance(e.get(key), int)]
    numbers = count(max(kept, default=0) + 1)
    facts: dict[tuple[Any, ...], TraceEvent] = {}
    timed: list[TraceEvent] = []
    for source in sources:
        ids: dict[Any, int] = defaultdict(lambda: next(numbers))  # torch counts from 1 in each file
        for event in source.events:
            if source.is_torch:
                event.update({key: ids[event[key]] for key in _IDS if key in event})
            if event["ph"] == "M":
                number = event["args"].get("number") if event["name"] == _SYNC else None
                facts[event["name"], event["pid"], event["tid"], number] = event
            elif "ts" in event:
                time_us = round(
                    event["ts"] + (source.offset_us - origin), 3
                )  # nanoseconds, the resolution of the clock
                timed.append({**event, "ts": int(time_us) if time_us == int(time_us) else time_us})
    tid = min((fact["tid"] for fact in facts.values() if isinstance(fact["tid"], int)), default=0)
    names = {fact["pid"] for fact in facts.values() if fact["name"] == "process_name"}
    about = [metadata_event(_ORIGIN, lowest, tid, unix_time_us=origin, rank=lowest)]
    for rank in sorted({event["pid"] for event in timed} - names):
        about.append(metadata_event("process_name", rank, tid, name=f"Rank {rank} training loop process"))
        about.append(metadata_event("process_sort_index", rank, tid, sort_index=rank))
    write_trace(Path(output_file), [*about, *facts.values(), *sorted(timed, key=lambda event: event["ts"])])


@dataclass
class _Source:
    """The content of a trace file.

    Attributes:
        events: The events, with the rank as the process of each.
        reference: The rank whose clock gave the times; in a merged file the lowest one.
        syncs: The time of each rank's clock at barriers, by rank and number of the barrier (-1 if unknown).
        offset_us: What to add to the times to get microseconds since 1970.
        is_torch: True for a file of torch's profiler.
    """

    events: list[TraceEvent]
    reference: int
    syncs: dict[int, dict[int, int]]
    offset_us: int = 0
    is_torch: bool = False


def _source(path: str | os.PathLike[str]) -> _Source:
    content = read_trace(path)
    if isinstance(content, dict):
        rank = content.get("global_rank", (content.get("distributedInfo") or {}).get("rank"))
        if rank is None:
            raise ValueError(f"{os.fspath(path)} does not say which rank it is from: it has no 'global_rank'.")
        sync = {int(content.get("clock_sync_number", -1)): int(content[_SYNC])} if _SYNC in content else {}
        base = int(content.get("baseTimeNanoseconds", 0)) // 1000  # whole seconds: an integer loses nothing
        return _Source(_of_torch(content["traceEvents"], int(rank)), int(rank), {int(rank): sync}, base, is_torch=True)
    events = [event for event in content if _has_thread(event)]
    facts = [event for event in events if event["ph"] == "M"]
    origins = [fact["args"] for fact in facts if fact["name"] == _ORIGIN]
    ranks = [fact["args"]["value"] for fact in facts if fact["name"] == _RANK]
    ranks = ranks or [event["pid"] for event in events if isinstance(event["pid"], int)]
    if not ranks:
        raise ValueError(f"{os.fspath(path)} does not say which rank it is from: no event has a number as its 'pid'.")
    if not origins:
        events = [{**event, "pid": int(ranks[0])} for event in events]
    syncs: dict[int, dict[int, int]] = defaultdict(dict)
    for fact in (event for event in events if event["name"] == _SYNC):
        syncs[fact["pid"]][int(fact["args"].get("number", -1))] = int(fact["args"]["value"])
    events = [event for event in events if event["name"] != _ORIGIN]
    return (
        _Source(events, int(ranks[0]), syncs)
        if not origins
        else _Source(events, int(origins[0]["rank"]), syncs, int(origins[0]["unix_time_us"]))
    )


def _has_thread(event: TraceEvent) -> bool:
    """Return False for an event that must be dropped."""
    is_known = not {event.get("pid"), event.get("tid")} & {None, ""}
    return is_known and "ph" in event and "name" in event and "PyTorch Profiler" not in str(event["tid"])


def _of_torch(events: list[TraceEvent], rank: int) -> list[TraceEvent]:
    """Return torch's events as events of a rank, and events that place their threads below those of the markers."""

    def row(event: TraceEvent) -> int:
        # The same in all files, and far from the numbers of threads, which the markers use.
        return zlib.crc32(f"{event['pid']} {event['tid']}".encode()) >> 1

    rows: dict[int, list[TraceEvent]] = {}
    found = []
    for event in filter(_has_thread, events):
        if event["ph"] == "M" and event["name"] in _OF_PROCESS:
            continue
        tid = row(event)
        if tid not in rows:
            name = f"torch {event['tid']}"
            rows[tid] = [
                metadata_event("thread_sort_index", rank, tid, sort_index=_LAST),
                metadata_event("thread_name", rank, tid, name=name),
            ]
        if event["name"] == _BACKWARD:
            rows[tid][0]["args"] = {"sort_index": 1}
        found.append({**event, "pid": rank, "tid": tid})
    return [*(fact for facts in rows.values() for fact in facts), *found]


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
    name, data = os.fspath(path), Path(path).read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not a trace: it is not JSON ({error}).") from error
    if isinstance(content, dict) and "traceEvents" not in content:
        raise ValueError(f"{name} is not a trace: its object has no 'traceEvents'.")
    events = content["traceEvents"] if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{name} is not a trace: it must hold a list of events, each of them an object.")
    return content


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
