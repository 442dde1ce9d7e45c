"""What a recorded run consists of."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Act",
    "Checkpoint",
    "Deeds",
    "Evaluation",
    "ModuleChange",
    "PlanEntry",
    "Resume",
    "Run",
    "Series",
    "Table",
]


@dataclass(frozen=True, eq=False)
class Series:
    """One metric over the run. The arrays have one length, in the order of logging.

    Attributes:
        name: What it was logged as.
        steps: Batches trained before it was logged, int64.
        seconds: Since the run began, without the time between an attempt and its resumption, float64.
        epochs: Epochs finished then, int64.
        values: Float64; NaN and infinity as they were logged.
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
        label: Of the evaluator.
        step: Batches trained before.
        seconds: Since the run began, at its end.
        duration: Of the evaluation, in seconds.
        batches: Evaluated batches.
        samples: Evaluated samples, over all ranks.
    """

    label: str
    step: int
    seconds: float
    duration: float
    batches: int
    samples: int


@dataclass(frozen=True)
class Act:
    """When an algorithm acted at one event.

    Attributes:
        event: The event, such as "before_forward".
        count: How often.
        spans: `(first batch, last batch, count)` of stretches in which it acted all the time or at short intervals.
    """

    event: str
    count: int
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Deeds:
    """What one algorithm did.

    Attributes:
        name: Its class.
        config: How it was made, as text.
        acts: When it acted, by event.
        told: What the run itself says it did (a table "algorithms" with the columns algorithm and deed), if it does.
        logged: Hyperparameters that it logged itself.
    """

    name: str
    config: str
    acts: tuple[Act, ...]
    told: str | None
    logged: dict[str, Any]


@dataclass(frozen=True)
class PlanEntry:
    """One row of `engine.explain()`.

    Attributes:
        event: The event.
        order: The position at the event, from 1.
        kind: "algorithm", "callback" or "logger".
        name: The class.
        reason: Why it stands there.
    """

    event: str
    order: int
    kind: str
    name: str
    reason: str


@dataclass(frozen=True)
class ModuleChange:
    """Modules that were replaced together.

    Attributes:
        before: The class before.
        after: The class after.
        count: How many.
        names: Their names in the model; of many, the first ones.
    """

    before: str
    after: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint.

    Attributes:
        path: Where it is, or was; None: it was uploaded.
        name: Its path seen from the run's folder.
        remote: Where it was uploaded to; None: nowhere.
        epoch: Epochs finished then.
        batch: Batches trained then.
        size: In bytes; None: it is not there.
        state: "there", "missing", "removed" (by the run itself, to keep only some) or "remote".
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
    """Where a run was resumed from a checkpoint.

    Attributes:
        batch: Batches trained in the checkpoint.
        epoch: Epochs finished in the checkpoint.
        seconds: Since the run began.
        superseded: Batches of the earlier attempt that were trained again.
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
        step: Batches trained before it was logged.
        columns: The names of its columns.
        rows: Its rows; of a long one the first.
        num_rows: How many rows it had.
    """

    name: str
    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    num_rows: int


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run.

    Attributes:
        folder: Where it was read from.
        name: The run's name.
        group: What it is one run of, such as a recipe with several seeds; None: it stands alone.
        seed: The seed of rank 0.
        started: When its first attempt began, in UTC; None: not known.
        seconds: How long it took, without the time between an attempt and its resumption.
        status: "finished", "stopped" (before its end), "crashed", "unfinished" (killed, or still running) or "unused"
            (never trained).
        error: What it crashed with.
        batches: Batches trained.
        epochs: Epochs finished.
        max_duration: How long it was to be, such as "10ep".
        environment: Machine and versions.
        model: The model's class and size.
        hyperparameters: By name.
        metrics: By name.
        texts: The last value of what was logged as a metric but is no number, by name.
        evaluations: In order.
        plan: `engine.explain()`.
        algorithms: In the user's order.
        modules: Modules that algorithms replaced.
        modules_added: Classes of modules that were added, with their number.
        checkpoints: In order.
        tables: The last of each name.
        resumes: In order.
        epoch_starts: `(epoch, batch)` of each epoch that began.
        epoch_batches: Batches in an epoch; None: not known.
        source: "recorder", or "log" if read from the text of a `FileLogger`.
        notes: What a reader should know of the record, such as a line that was cut off.
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
    evaluations: list[Evaluation] = field(default_factory=list)
    plan: list[PlanEntry] = field(default_factory=list)
    algorithms: list[Deeds] = field(default_factory=list)
    modules: list[ModuleChange] = field(default_factory=list)
    modules_added: dict[str, int] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    epoch_starts: list[tuple[int, int]] = field(default_factory=list)
    epoch_batches: int | None = None
    source: str = "recorder"
    notes: list[str] = field(default_factory=list)
