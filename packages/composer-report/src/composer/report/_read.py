"""Find and read recorded runs: the attempts of a run, and the part of each that led to the current state."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from composer.report._model import (
    AlgorithmActions,
    Checkpoint,
    Evaluation,
    Images,
    ModuleChange,
    PlanEntry,
    Resume,
    Run,
    Series,
    Table,
    act_of,
    append_spans,
)

_RECORD = re.compile(r"run-rank(\d+)\.jsonl")
_DEPTH = 3  # levels of folders below the given one
_MOST_FOLDERS = 2000
SCHEMA = 1
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# ---- folders of runs ----


class RunNotFoundError(FileNotFoundError):
    """A folder has no recorded run."""


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the folders of runs.

    Args:
        folders: Folders of runs, or folders that contain them, up to three levels down.

    Raises:
        RunNotFoundError: One of them has no run.
    """
    runs: list[Path] = []
    for folder in map(Path, folders):
        below = _find_below(folder)
        if not below:
            raise run_not_found(folder)
        runs.extend(path for path in below if path not in runs)
    return runs


def _find_below(folder: Path) -> list[Path]:
    if record_of(folder) is not None:
        return [folder]
    runs, level, visited = [], [folder], 0
    for _ in range(_DEPTH):
        level = [child for parent in level if parent.is_dir() for child in parent.iterdir() if child.is_dir()]
        visited += len(level)
        runs += [child for child in level if record_of(child) is not None]
        if runs or visited > _MOST_FOLDERS:
            break
    return sorted(runs, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key: "seed10" after "seed2", and "0.01" before "0.1"."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", str(path))]


def record_of(folder: Path) -> Path | None:
    """Return the record of the lowest rank, or None."""
    if not folder.is_dir():
        return None
    ranks = {}
    for path in folder.iterdir():
        match = _RECORD.fullmatch(path.name)
        if match and path.stat().st_size:
            ranks[int(match[1])] = path
    return ranks[min(ranks)] if ranks else None


def run_not_found(folder: Path) -> RunNotFoundError:
    """Return the error for a folder without a run."""
    if not folder.exists():
        reason = "it does not exist"
    elif not folder.is_dir():
        reason = "it is not a folder"
    else:
        reason = f"neither it nor its subfolders, up to {_DEPTH} levels down, have a `run-rank0.jsonl` with a run"
    return RunNotFoundError(
        f"{str(folder)!r} must be the folder of a run, but {reason}. To record a run, pass "
        f"`loggers=[composer.loggers.RunRecorder('my-run')]` to the `Trainer`, or run `composer-train digits`."
    )


# ---- attempts ----


@dataclass
class Column:
    """The values of one metric, and the index of the metrics line of each."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def before(self, line: int) -> Column:
        """Return a column with the values of the lines before one."""
        count = bisect_left(self.lines, line)
        return Column(self.lines[:count], self.values[:count])


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
        """Return the part before a checkpoint, without marks."""
        lines, count, seconds = self.marks[mark]
        columns = {name: column.before(lines) for name, column in self.columns.items()}
        columns = {name: column for name, column in columns.items() if column.values}
        return replace(self, columns=columns, records=self.records[:count], marks={}, seconds=seconds)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _NOT_FINITE[value]
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return math.inf if value > 0 else -math.inf


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
                if record.get("schema") != SCHEMA:
                    raise ValueError(
                        f"{str(path)!r} must be a record of schema {SCHEMA}, got {record.get('schema')!r}. It was "
                        "written by another release of `composer-loggers`. Run `pip install --upgrade composer-report`."
                    )
                attempts.append(Attempt(record))
            elif not attempts:
                unknown += 1
    if damaged:
        subject = "line was" if damaged == 1 else "lines were"
        notes.append(f"{damaged} {subject} damaged, such as by a process killed while writing, and left out.")
    if unknown:
        notes.append(f"{unknown} lines before the start of the record were left out.")
    return attempts


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
        else:
            index = 0
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


# ---- a run ----


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run recorded by `RunRecorder`.

    If a run was resumed, values that the checkpoint does not include are left out.

    Args:
        folder: The run's folder.

    Raises:
        RunNotFoundError: It has no run.
        ValueError: It was recorded by a later release.

    Example:
        >>> import tempfile, torch
        >>> from composer.core import Engine, State
        >>> from composer.loggers import RunRecorder
        >>> recorder = RunRecorder(folder := tempfile.mkdtemp())
        >>> state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", callbacks=[recorder], run_name="a")
        >>> engine = Engine(state)
        >>> _ = engine.run_event("init")
        >>> engine.logger.log_metrics({"loss": 0.5})
        >>> engine.close()
        >>> run = read_run(folder)
        >>> run.name, run.metrics["loss"].values.tolist()
        ('a', [0.5])
    """
    path = Path(folder).expanduser()
    record, notes = record_of(path), list[str]()
    attempts = [] if record is None else read_attempts(record, notes)
    if not attempts:
        raise run_not_found(path)
    chain = list(current_attempts(attempts, notes))
    return _Reader(path, chain, notes).run()


class _Reader:
    """Builds a `Run` from attempts.

    Args:
        folder: The run's folder.
        chain: The attempts that led to the current state.
        notes: Remarks about the record.
    """

    def __init__(self, folder: Path, chain: list[Attempt], notes: list[str]) -> None:
        self.folder, self.chain, self.notes = folder, chain, notes

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a type, with the seconds since the run began."""
        return [
            {**record, "seconds": record.get("seconds", 0.0) + attempt.offset}
            for attempt in self.chain
            for record in attempt.records
            if record["type"] == kind
        ]

    def last(self, kind: str) -> dict[str, Any]:
        """Return the last record of a type, or an empty dict."""
        records = self.all(kind)
        return records[-1] if records else {}

    def run(self) -> Run:
        """Return the run."""
        start, final = self.chain[-1].start, self.chain[-1]
        hyperparameters = self._merged("hyperparameters")
        status: str = "unfinished"
        error: str | None = None
        for end in final.records:
            if end["type"] == "end":
                status, raised = end["status"], end["error"]
                error = None if raised is None else f"{raised['type']}: {raised['message']}".removesuffix(": ")
        dropped = sum(record.get("dropped", 0) for record in self.all("end"))
        if dropped:
            self.notes.append(f"{dropped:,} records were dropped because the disk was too slow.")
        # Without a recorded end, the run trained at least as far as metrics were logged.
        times = [*self.all("epoch"), *self.all("fit_end"), *self.all("end")]
        logged = 0 if self.all("end") else final.last_step
        batches = max([logged, *(record["batch"] for record in times)])
        fit = self.last("fit_start")
        return Run(
            folder=self.folder,
            name=str(start["run_name"]),
            group=start.get("group"),
            seed=start.get("seed"),
            started=datetime.datetime.fromtimestamp(self.chain[0].start["time"], datetime.UTC),
            seconds=final.offset + final.seconds,
            status=status,
            error=error,
            batches=batches,
            epochs=max([record["epoch"] for record in times], default=0),
            max_duration=fit.get("max_duration"),
            environment=self.last("environment").get("values", {}),
            model=self.last("model").get("values", {}),
            hyperparameters=hyperparameters,
            metrics=self._metrics(),
            texts=self._merged("texts"),
            arrays={record["name"]: np.array(record["values"], dtype=np.float64) for record in self.all("array")},
            evaluations=[
                Evaluation(*(record[field.name] for field in fields(Evaluation))) for record in self.all("evaluation")
            ],
            plan=[PlanEntry(**row) for row in self.last("plan").get("rows", [])],
            algorithms=self._algorithms(hyperparameters),
            modules=[change for record in self.all("modules")[:1] for change in _module_changes(record)],
            modules_added={k: v for record in self.all("modules")[:1] for k, v in record["added"].items()},
            checkpoints=self._checkpoints(),
            tables=list({table.name: table for table in map(_table, self.all("table"))}.values()),
            images=list({each.name: each for each in map(self._images, self.all("images"))}.values()),
            resumes=self._resumes(),
            epoch_starts=sorted({(r["epoch"], r["batch"]) for r in self.all("epoch") if not r["batch_in_epoch"]}),
            epoch_batches=fit.get("epoch_batches"),
            notes=self.notes,
        )

    def _merged(self, kind: str) -> dict[str, Any]:
        """Return the values of all records of a type; later ones override earlier ones."""
        return {key: value for record in self.all(kind) for key, value in record["values"].items()}

    def _metrics(self) -> dict[str, Series]:
        parts: dict[str, list[tuple[np.ndarray, ...]]] = {}
        for attempt in self.chain:
            steps = np.asarray(attempt.steps, dtype=np.int64)
            seconds = np.asarray(attempt.times, dtype=np.float64) + attempt.offset
            epochs = np.asarray(attempt.epochs, dtype=np.int64)
            for name, column in attempt.columns.items():
                lines = np.asarray(column.lines)
                values = np.asarray(column.values, dtype=np.float64)
                parts.setdefault(name, []).append((steps[lines], seconds[lines], epochs[lines], values))
        return {name: Series(name, *map(np.concatenate, zip(*each, strict=True))) for name, each in parts.items()}

    def _algorithms(self, hyperparameters: dict[str, Any]) -> list[AlgorithmActions]:
        actions: dict[str, dict[str, list[list[int]]]] = {}
        for record in self.all("actions"):
            for act in record["values"]:
                spans = actions.setdefault(act["algorithm"], {}).setdefault(act["event"], [])
                append_spans(spans, act["spans"])
        named = {entry["name"]: entry["config"] for entry in self.last("algorithms").get("values", [])}
        return [
            AlgorithmActions(
                name,
                named.get(name, ""),
                tuple(act_of(event, spans) for event, spans in actions.get(name, {}).items()),
                {
                    key: value
                    for key, value in hyperparameters.items()
                    if _without_case(key.split("/")[0]) == _without_case(name)
                },
            )
            for name in dict.fromkeys([*named, *actions])
        ]

    def _images(self, record: dict[str, Any]) -> Images:
        folder, files = self.folder.resolve(), [self.folder / name for name in record["files"]]
        # No file outside of the folder is shown, whatever the record says.
        inside = tuple(file for file in files if file.resolve().is_relative_to(folder))
        return Images(record["name"], record["step"] or 0, inside, record["num_images"])

    def _checkpoints(self) -> list[Checkpoint]:
        kept = {path for record in self.all("end")[-1:] for path in record["kept_checkpoints"]}
        ended = bool(self.all("end"))
        unique = {record["path"]: record for record in self.all("checkpoint")}
        checkpoints = []
        for name, record in sorted(unique.items(), key=lambda item: item[1]["batch"]):
            remote = record["remote"]
            path = None if remote else Path(os.path.normpath(self.folder / name))
            size = None if path is None else _size(path)
            removed = ended and name not in kept
            state = "remote" if remote else "there" if size is not None else "removed" if removed else "missing"
            checkpoints.append(Checkpoint(path, name, remote, record["epoch"], record["batch"], size, state))
        return checkpoints

    def _resumes(self) -> list[Resume]:
        resumes = []
        for before, attempt in zip([None, *self.chain], self.chain, strict=False):
            if attempt.resume is not None:
                batch = attempt.resume["batch"]
                lost = 0 if before is None else max(0, before.last_step - batch)
                resumes.append(Resume(batch, attempt.resume["epoch"], attempt.offset, lost))
        return resumes


def _module_changes(record: dict[str, Any]) -> list[ModuleChange]:
    return [
        ModuleChange(
            kind["before"],
            kind["after"],
            kind["count"],
            tuple(
                each["module"]
                for each in record["replaced"]
                if (each["before"], each["after"]) == (kind["before"], kind["after"])
            ),
        )
        for kind in record["kinds"]
    ]


def _table(record: dict[str, Any]) -> Table:
    rows = tuple(tuple(row) for row in record["rows"])
    return Table(record["name"], record["step"] or 0, tuple(record["columns"]), rows, record["num_rows"])


def _without_case(name: str) -> str:
    return name.lower().replace("_", "")


def _size(path: Path) -> int | None:
    """Return the size of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.is_file() else None
