"""Reading and writing files in Chrome's Trace Event Format."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["TraceEvent", "parse_trace", "read_trace", "write_trace"]

TraceEvent = dict[str, Any]


def read_trace(path: str | os.PathLike[str]) -> Any:
    """The content of a trace file: a list of events, or a dict that has them as "traceEvents".

    Args:
        path: The file; compressed if it ends in ".gz".

    Raises:
        ValueError: It holds something else.
    """
    if str(path).endswith(".gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
    else:
        text = Path(path).read_text(encoding="utf-8")
    return parse_trace(text, os.fspath(path))


def parse_trace(text: str, name: str = "the trace") -> Any:
    """The content of a trace.

    A list may lack its end, as the format allows: a comma may follow its last event, its bracket may be missing, and
    what is left of an event that was cut off is ignored.

    Args:
        text: JSON.
        name: Where it is from, for messages.

    Raises:
        ValueError: It is neither a list of events nor a dict with them.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):
            raise ValueError(f"{name} is no trace: it is not JSON ({error}).") from error
        content = _whole_events(text)
    if isinstance(content, dict) and "traceEvents" not in content:
        raise ValueError(f"{name} is no trace: its object has no 'traceEvents'.")
    events = content["traceEvents"] if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{name} is no trace: it must hold a list of events, each of them an object.")
    return content


def _whole_events(text: str) -> list[Any]:
    """The values of a list up to where it breaks off."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return found
        found.append(value)


def write_trace(path: Path, events: Iterable[TraceEvent]) -> None:
    """Write a list of events, an event per line. The file appears under its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # in the same folder: it can be renamed there
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write("[\n")
            file.write(",\n".join(json.dumps(event) for event in events))
            file.write("\n]\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
