"""Read the text log of a `FileLogger`."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from composer.report._model import AlgorithmActions, Run, Series, Table, act_of, append_spans

_LINE = re.compile(r"\[(metric\]\[batch=(?P<step>\d+)|hyperparameter|trace|table|stderr)\]: (?P<rest>.*)")
_ERROR = re.compile(r"(?P<error>[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b.*)")


def read_log(folder: Path, path: Path) -> Run:
    """Return the run in a text log, without times and with four decimals."""
    reader = _LogReader()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _LINE.fullmatch(line.rstrip("\n"))
            if match:
                reader.add(match)
    stat = path.stat()
    error = reader.error
    return Run(
        folder=folder,
        name=folder.resolve().name,
        started=datetime.datetime.fromtimestamp(stat.st_mtime, datetime.timezone.utc),
        status="crashed" if error else "unfinished",
        error=error,
        batches=max([int(s.steps[-1]) for s in reader.metrics().values()], default=0),
        epochs=int(reader.last("time/epoch")),
        hyperparameters=reader.hyperparameters,
        metrics=reader.metrics(),
        texts=reader.texts,
        algorithms=reader.algorithms(),
        tables=list(reader.tables.values()),
        source="log",
        notes=[
            f"Read from the text log {path.name}, which has no times, no environment and no end, and numbers with four "
            f"decimals. Use `RunRecorder` to record more."
        ],
    )


class _LogReader:
    """Collects the lines of a log."""

    def __init__(self) -> None:
        self.hyperparameters: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self.tables: dict[str, Table] = {}
        self.error: str | None = None
        self._columns: dict[str, tuple[list[int], list[float]]] = {}
        self._acts: dict[str, dict[str, list[list[int]]]] = {}
        self._step = 0
        self._traceback = False

    def add(self, match: re.Match[str]) -> None:
        """Add a line."""
        kind, rest = match[1], match["rest"]
        name, _, value = rest.partition(": ")
        if kind.startswith("metric"):
            self._step = int(match["step"])
            self._add_metric(name, value.strip())
        elif kind == "hyperparameter":
            self.hyperparameters[name] = _value(value.strip())
        elif kind == "trace":
            self._add_trace(rest.rpartition(":")[0])
        elif kind == "table":
            self._add_table(name, value)
        else:
            self._add_stderr(rest)

    def _add_metric(self, name: str, text: str) -> None:
        try:
            number = float(text)
        except ValueError:
            self.texts[name] = text.strip('"')
            return
        steps, values = self._columns.setdefault(name, ([], []))
        steps.append(self._step)
        values.append(number)

    def _add_trace(self, key: str) -> None:
        parts = key.split("/")
        if len(parts) == 3:
            _, name, event = parts
            spans = self._acts.setdefault(name, {}).setdefault(event.removeprefix("Event.").lower(), [])
            append_spans(spans, [[self._step, self._step, 1]])

    def _add_table(self, name: str, text: str) -> None:
        try:
            content = json.loads(text)
            rows = tuple(tuple(row) for row in content["data"])
            self.tables[name] = Table(name, self._step, tuple(content["columns"]), rows, len(rows))
        except (ValueError, KeyError, TypeError):
            self.texts[name] = text  # truncated

    def _add_stderr(self, text: str) -> None:
        if text.startswith("Traceback (most recent call last)"):
            self._traceback = True
        elif self._traceback and (match := _ERROR.fullmatch(text)):
            self.error, self._traceback = match["error"], False

    def last(self, name: str) -> float:
        """Return the last value of a metric, or 0."""
        return self._columns[name][1][-1] if name in self._columns else 0.0

    def metrics(self) -> dict[str, Series]:
        """Return all metrics."""
        return {
            name: Series(
                name,
                np.array(steps, dtype=np.int64),
                np.full(len(steps), np.nan),
                np.zeros(len(steps), dtype=np.int64),
                np.array(values, dtype=np.float64),
            )
            for name, (steps, values) in self._columns.items()
        }

    def algorithms(self) -> list[AlgorithmActions]:
        """Return the algorithms in the traces."""
        return [
            AlgorithmActions(name, "", tuple(act_of(event, spans) for event, spans in acts.items()), None, {})
            for name, acts in self._acts.items()
        ]


def _value(text: str) -> Any:
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
