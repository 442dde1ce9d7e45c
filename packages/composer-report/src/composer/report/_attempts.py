"""Attempts of a run: the processes that recorded it, and the part of each that led to the current state."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Column:
    """The values of one metric, and the index of the metrics line of each."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def select(self, mask: np.ndarray) -> Column:
        """Return a column with the values of some lines; `mask` has one bool per line of metrics."""
        lines, values = np.asarray(self.lines), np.asarray(self.values)
        selected = mask[lines]
        return Column(array("q", lines[selected].tobytes()), array("d", values[selected].tobytes()))


@dataclass
class Attempt:
    """The records of one process, from "start" to "end" or until it was killed.

    Attributes:
        start: The record "start".
        columns: Metrics by name.
        steps: The step of each line of metrics.
        epochs: The epoch of each line of metrics.
        times: Seconds since the attempt began of each line of metrics.
        records: All other records, in order.
        marks: For each checkpoint mark, the numbers of lines of metrics and of records before it, and the seconds.
        resume: The record "resume", if it resumed from a checkpoint.
        seconds: The time of its last record.
        offset: Seconds of the attempts before it.
        cut: True if records after a checkpoint were removed.
    """

    start: dict[str, Any]
    columns: dict[str, Column] = field(default_factory=dict)
    steps: array[int] = field(default_factory=lambda: array("q"))
    epochs: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    records: list[dict[str, Any]] = field(default_factory=list)
    marks: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    resume: dict[str, Any] | None = None
    seconds: float = 0.0
    last_step: int = 0
    offset: float = 0.0
    cut: bool = False

    def add(self, record: dict[str, Any]) -> None:
        """Add a record."""
        kind = record["type"]
        self.seconds = max(self.seconds, float(record.get("seconds", 0.0)))
        if kind == "metrics":
            self._add_metrics(record)
            return
        if kind == "mark":
            self.marks[record["mark"]] = (len(self.steps), len(self.records), float(record["seconds"]))
        elif kind == "resume":
            self.resume = record
        self.records.append(record)

    def _add_metrics(self, record: dict[str, Any]) -> None:
        step, epoch, seconds = int(record["step"]), int(record["epoch"]), float(record["seconds"])
        self.last_step = max(self.last_step, step)
        columns, line = self.columns, len(self.steps)
        self.steps.append(step)
        self.epochs.append(epoch)
        self.times.append(seconds)
        for name, value in record["values"].items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column()
            number = value if type(value) is float else _number(value)
            column.lines.append(line)
            column.values.append(number)
        if "texts" in record:
            self.records.append({"type": "texts", "values": record["texts"], "step": step, "seconds": seconds})

    def up_to_mark(self, mark: str) -> Attempt:
        """Return the part before a checkpoint."""
        lines, count, seconds = self.marks[mark]
        return self._cut(np.arange(len(self.steps)) < lines, self.records[:count], seconds)

    def up_to_batch(self, batch: int) -> Attempt:
        """Return the part before a batch, including the evaluations after that batch."""
        mask = np.asarray(self.steps) < batch
        records = [r for r in self.records if r.get("batch", r.get("step", 0)) <= batch and r["type"] != "actions"]
        records += [_actions_before(r, batch) for r in self.records if r["type"] == "actions"]
        return self._cut(mask, records, float(np.asarray(self.times)[mask].max(initial=0.0)))

    def _cut(self, mask: np.ndarray, records: list[dict[str, Any]], seconds: float) -> Attempt:
        """Return the attempt with some of its lines of metrics and records, without marks."""
        columns = {name: column.select(mask) for name, column in self.columns.items()}
        columns = {name: column for name, column in columns.items() if column.values}
        return replace(self, columns=columns, records=records, marks={}, seconds=seconds, cut=True)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _NOT_FINITE[value]
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return math.inf if value > 0 else -math.inf


def _actions_before(record: dict[str, Any], batch: int) -> dict[str, Any]:
    values = []
    for act in record["values"]:
        spans = [[first, min(last, batch), count] for first, last, count in act["spans"] if first < batch]
        values.append({**act, "spans": spans, "count": sum(span[2] for span in spans)})
    return {**record, "values": [act for act in values if act["spans"]]}


def read_attempts(path: Path, notes: list[str]) -> list[Attempt]:
    """Return the attempts in a file.

    Args:
        path: The file.
        notes: Remarks about the file are appended here.

    Raises:
        ValueError: The file was written by a later release.
    """
    attempts: list[Attempt] = []
    damaged = unknown = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                starts = record["type"] == "start"
                if attempts and not starts:
                    attempts[-1].add(record)
            except (ValueError, KeyError, TypeError):
                damaged += 1
                continue
            if starts:
                _check_schema(record, path)
                attempts.append(Attempt(record))
            elif not attempts:
                unknown += 1
    if damaged:
        subject = "line was" if damaged == 1 else "lines were"
        notes.append(f"{damaged} {subject} damaged, such as by a process killed while writing, and left out.")
    if unknown:
        notes.append(f"{unknown} lines before the start of the record were left out.")
    return attempts


def _check_schema(record: dict[str, Any], path: Path) -> None:
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"{str(path)!r} must be a record of schema {SCHEMA}, got {record.get('schema')!r}. It was written by "
            f"another release of `composer-loggers`. Run `pip install --upgrade composer-report`."
        )


def current_attempts(attempts: list[Attempt], notes: list[str]) -> Iterable[Attempt]:
    """Return the attempts that led to the current state, each without superseded records.

    These are the last attempt and, if it resumed from a checkpoint, the part of an earlier one before that checkpoint,
    and so on.

    Args:
        attempts: All attempts, oldest first; at least one.
        notes: Remarks about the run are appended here.
    """
    index = len(attempts) - 1
    chain = [attempts[index]]
    while chain[0].resume is not None:
        mark, batch = chain[0].resume.get("mark"), chain[0].resume["batch"]
        saved_by = [i for i in range(index) if mark in attempts[i].marks]
        if mark is not None and saved_by:
            index = saved_by[-1]
            chain.insert(0, attempts[index].up_to_mark(mark))
        elif index > 0:
            index -= 1
            chain.insert(0, attempts[index].up_to_batch(batch))
        else:
            notes.append(f"The run resumed from batch {batch}; earlier batches were recorded elsewhere.")
            break
    if index > 0 and chain[0].resume is None:
        subject = "attempt that was" if index == 1 else "attempts that were"
        notes.append(f"The folder also has {index} earlier {subject} not resumed; the last one is shown.")
    offset = 0.0
    for attempt in chain:
        attempt.offset = offset
        offset += attempt.seconds
    return chain
