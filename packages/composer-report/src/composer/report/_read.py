"""Read a recorded run."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np

from composer.report._attempts import Attempt, current_attempts, read_attempts
from composer.report._find import log_of, record_of, run_not_found
from composer.report._model import (
    AlgorithmActions,
    Checkpoint,
    Evaluation,
    ModuleChange,
    PlanEntry,
    Resume,
    Run,
    Table,
    act_of,
    append_spans,
)
from composer.report._model import Series as Series
from composer.report._textlog import read_log


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run recorded by `RunRecorder`, or otherwise the log of a `FileLogger`.

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
    record = record_of(path)
    if record is None:
        log = log_of(path)
        if log is None:
            raise run_not_found(path)
        return read_log(path, log)
    notes: list[str] = []
    attempts = read_attempts(record, notes)
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
        status, error = self._ending()
        self._note_dropped()
        epochs, batches = self._trained()
        fit = self.last("fit_start")
        return Run(
            folder=self.folder,
            name=str(start["run_name"]),
            group=start.get("group"),
            seed=start.get("seed"),
            started=datetime.datetime.fromtimestamp(self.chain[0].start["time"], datetime.timezone.utc),
            seconds=final.offset + final.seconds,
            status=status,
            error=error,
            batches=batches,
            epochs=epochs,
            max_duration=fit.get("max_duration"),
            environment=self.last("environment").get("values", {}),
            model=self.last("model").get("values", {}),
            hyperparameters=hyperparameters,
            metrics=self._metrics(),
            texts=self._merged("texts"),
            arrays={record["name"]: np.array(record["values"], dtype=np.float64) for record in self.all("array")},
            evaluations=[_evaluation(record) for record in self.all("evaluation")],
            plan=[PlanEntry(**row) for row in self.last("plan").get("rows", [])],
            algorithms=self._algorithms(hyperparameters),
            modules=[change for record in self.all("modules")[:1] for change in _module_changes(record)],
            modules_added={k: v for record in self.all("modules")[:1] for k, v in record["added"].items()},
            checkpoints=self._checkpoints(),
            tables=list({table.name: table for table in map(_table, self.all("table"))}.values()),
            resumes=self._resumes(),
            epoch_starts=sorted({(r["epoch"], r["batch"]) for r in self.all("epoch") if not r["batch_in_epoch"]}),
            epoch_batches=fit.get("epoch_batches"),
            notes=self.notes,
        )

    def _merged(self, kind: str) -> dict[str, Any]:
        """Return the values of all records of a type; later ones override earlier ones."""
        return {key: value for record in self.all(kind) for key, value in record["values"].items()}

    def _note_dropped(self) -> None:
        dropped = sum(record.get("dropped", 0) for record in self.all("end"))
        if dropped:
            self.notes.append(f"{dropped:,} records were dropped because the disk was too slow.")

    def _trained(self) -> tuple[int, int]:
        """Return finished epochs and trained batches; if no end was recorded, as far as metrics were logged."""
        times = [*self.all("epoch"), *self.all("fit_end"), *self.all("end")]
        logged = 0 if self.all("end") else self.chain[-1].last_step
        batches = max([record["batch"] for record in times], default=0)
        return max([record["epoch"] for record in times], default=0), max(batches, logged)

    def _ending(self) -> tuple[str, str | None]:
        end = [record for record in self.chain[-1].records if record["type"] == "end"]
        if not end:
            return "unfinished", None
        error = end[-1]["error"]
        return end[-1]["status"], None if error is None else f"{error['type']}: {error['message']}".removesuffix(": ")

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
        descriptions = {
            str(row[0]): str(row[1])
            for table in self.all("table")
            if table["name"] == "algorithms" and table["columns"] == ["algorithm", "description"]
            for row in table["rows"]
        }
        named = {entry["name"]: entry["config"] for entry in self.last("algorithms").get("values", [])}
        return [
            AlgorithmActions(
                name,
                named.get(name, ""),
                tuple(act_of(event, spans) for event, spans in actions.get(name, {}).items()),
                descriptions.get(name),
                {
                    key: value
                    for key, value in hyperparameters.items()
                    if _without_case(key.split("/")[0]) == _without_case(name)
                },
            )
            for name in dict.fromkeys([*named, *actions])
        ]

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


def _evaluation(r: dict[str, Any]) -> Evaluation:
    return Evaluation(r["label"], r["step"], r["seconds"], r["duration"], r["batches"], r["samples"])


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
