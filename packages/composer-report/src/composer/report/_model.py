"""A recorded run as Python objects."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one metric. All arrays have the same length, in the order of logging.

    Attributes:
        name: The logged name.
        steps: Number of trained batches, int64.
        seconds: Seconds since the run began, without the time between an attempt and its resumption, float64.
        epochs: Number of finished epochs, int64.
        values: The values, float64, including NaN and infinity.
    """

    name: str
    steps: np.ndarray
    seconds: np.ndarray
    epochs: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The last value."""
        return float(self.values[-1])


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        label: The label of the evaluator.
        step: Number of trained batches.
        seconds: Seconds from the start of the run to the end of the evaluation.
        duration: Seconds that it took.
        batches: Number of evaluated batches.
        samples: Number of evaluated samples, summed over all ranks.
    """

    label: str
    step: int
    seconds: float
    duration: float
    batches: int
    samples: int


@dataclass(frozen=True)
class Act:
    """The calls of an algorithm at one event.

    Attributes:
        event: The event, such as "before_forward".
        count: Number of calls.
        spans: `(first batch, last batch, count)` of ranges of batches with calls at short intervals.
    """

    event: str
    count: int
    spans: tuple[tuple[int, int, int], ...]


def act_of(event: str, spans: Sequence[Sequence[int]]) -> Act:
    """Return the calls at an event in some spans."""
    return Act(event, sum(span[2] for span in spans), tuple((a, b, c) for a, b, c in spans))


def append_spans(spans: list[list[int]], more: Sequence[Sequence[int]]) -> None:
    """Append later spans; a span that continues the last one extends it."""
    for first, last, count in more:
        if spans and first - spans[-1][1] <= 1:
            spans[-1][1] = max(spans[-1][1], last)
            spans[-1][2] += count
        else:
            spans.append([first, last, count])


@dataclass(frozen=True)
class AlgorithmActions:
    """The actions of one algorithm.

    Attributes:
        name: Its class.
        config: Its `repr`.
        acts: Its calls, by event.
        logged: Hyperparameters that it logged.
    """

    name: str
    config: str
    acts: tuple[Act, ...]
    logged: dict[str, Any]


@dataclass(frozen=True)
class PlanEntry:
    """One row of `engine.explain()`.

    Attributes:
        event: The event.
        order: The position at the event, from 1.
        kind: "algorithm", "callback" or "logger".
        name: The class.
        reason: The reason for the position.
    """

    event: str
    order: int
    kind: str
    name: str
    reason: str


@dataclass(frozen=True)
class ModuleChange:
    """Replaced modules of one class.

    Attributes:
        before: The class before.
        after: The class after.
        count: Number of modules.
        names: Their names in the model; the first ones if there are many.
    """

    before: str
    after: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint.

    Attributes:
        path: The local path. None: it was uploaded.
        name: The path relative to the run's folder.
        remote: The URL it was uploaded to, or None.
        epoch: Number of finished epochs.
        batch: Number of trained batches.
        size: Size in bytes. None: it does not exist.
        state: "there", "missing", "removed" (by the run, which keeps only some) or "remote".
    """

    path: Path | None
    name: str
    remote: str | None
    epoch: int
    batch: int
    size: int | None
    state: str


@dataclass(frozen=True)
class Resume:
    """The resumption of a run from a checkpoint.

    Attributes:
        batch: Number of trained batches in the checkpoint.
        epoch: Number of finished epochs in the checkpoint.
        seconds: Seconds since the run began.
        superseded: Number of batches of the earlier attempt that were trained again.
    """

    batch: int
    epoch: int
    seconds: float
    superseded: int


@dataclass(frozen=True)
class Table:
    """A logged table.

    Attributes:
        name: Its name.
        step: Number of trained batches.
        columns: The names of its columns.
        rows: Its rows; the first ones if there are many.
        num_rows: Number of all rows.
    """

    name: str
    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    num_rows: int


@dataclass(frozen=True)
class Images:
    """Images that were logged together.

    Attributes:
        name: The name.
        step: The batch.
        files: PNG files.
        num_images: Number of logged images, of which only the first are recorded if there are many.
    """

    name: str
    step: int
    files: tuple[Path, ...]
    num_images: int


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run.

    Attributes:
        folder: The folder it was read from.
        name: The run's name.
        group: The group of runs it belongs to, such as the seeds of a recipe, or None.
        seed: The seed of rank 0.
        started: Start of the first attempt, in UTC. None: unknown.
        seconds: Its duration, without the time between an attempt and its resumption.
        status: "finished", "stopped" (before its end), "crashed", "unfinished" (killed, or still running) or "unused"
            (never trained).
        error: The error that it crashed with.
        batches: Number of trained batches.
        epochs: Number of finished epochs.
        max_duration: The requested duration, such as "10ep".
        environment: The machine and versions.
        model: The model's class and size.
        hyperparameters: By name.
        metrics: By name.
        texts: The last logged value of metrics that are not numbers, by name.
        arrays: The last logged value of metrics that are arrays, such as a confusion matrix, by name.
        evaluations: In order.
        plan: `engine.explain()`.
        algorithms: In the user's order.
        modules: Modules that algorithms replaced.
        modules_added: Number of added modules, by class.
        checkpoints: In order.
        tables: The last one of each name.
        images: The last ones of each name.
        resumes: In order.
        epoch_starts: `(epoch, batch)` of each epoch that began.
        epoch_batches: Number of batches in an epoch. None: unknown.
        notes: Remarks about the record, such as a damaged line.
    """

    folder: Path
    name: str
    group: str | None = None
    seed: int | None = None
    started: datetime.datetime | None = None
    seconds: float = 0.0
    status: str = "unfinished"
    error: str | None = None
    batches: int = 0
    epochs: int = 0
    max_duration: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    plan: list[PlanEntry] = field(default_factory=list)
    algorithms: list[AlgorithmActions] = field(default_factory=list)
    modules: list[ModuleChange] = field(default_factory=list)
    modules_added: dict[str, int] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    images: list[Images] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    epoch_starts: list[tuple[int, int]] = field(default_factory=list)
    epoch_batches: int | None = None
    notes: list[str] = field(default_factory=list)
