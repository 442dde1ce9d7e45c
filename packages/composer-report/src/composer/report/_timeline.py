"""When algorithms acted, evaluations ran and checkpoints were saved, on one axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from composer.report._charts import Chart, Charts, epochs_at, packed
from composer.report._html import Html, count
from composer.report._model import Deeds, Run

__all__ = ["draw_timeline"]

_ROW = 19  # pixels
_MOST_ROWS = 60
_ORDER = (
    "init before_load after_load fit_start iteration_start epoch_start before_dataloader after_dataloader batch_start "
    "before_train_batch before_forward after_forward before_loss after_loss before_backward after_backward "
    "after_train_batch batch_end batch_checkpoint epoch_end epoch_checkpoint"
).split()

Row = tuple[str, int | None, list[tuple[int, int, str]]]  # label, slot (None: a heading), spans with their text


def draw_timeline(run: Run, charts: Charts, slots: dict[str, int]) -> Html | None:
    """The timeline of a run; None if there is nothing to show.

    Args:
        run: The run.
        charts: Gets the chart.
        slots: The colour of each algorithm.
    """
    rows = [*_run_rows(run)]
    for algorithm in run.algorithms:
        rows += _algorithm_rows(algorithm, slots[algorithm.name])
    if not rows:
        return None
    if len(rows) > _MOST_ROWS:
        rows = [*_run_rows(run), *(_joined(algorithm, slots[algorithm.name]) for algorithm in run.algorithms)]
    end = float(max(run.batches, 1))
    data: dict[str, Any] = {
        "kind": "timeline",
        "height": len(rows) * _ROW + 62,
        "labels": [f"<b>{_safe(label)}</b>" if slot is None else _safe(label) for label, slot, _ in rows],
        "bars": [_bars(run, i, slot, spans) for i, (_, slot, spans) in enumerate(rows) if slot is not None],
        "end": _span_xs(run, np.array([end]), np.array([0.0])),
    }
    if run.epoch_starts:
        charts.has_epochs = True
    return charts.place(data, Chart("", "", (), wide=True))


def _run_rows(run: Run) -> Iterable[Row]:
    rows: list[Row] = []
    labels = dict.fromkeys(evaluation.label for evaluation in run.evaluations)
    for label in labels:
        found = [e for e in run.evaluations if e.label == label]
        rows.append((f"evaluation {label}", 7, [(e.step, e.step, count(e.batches, "batch")) for e in found]))
    if run.checkpoints:
        rows.append(("checkpoint", 7, [(c.batch, c.batch, c.name) for c in run.checkpoints]))
    if run.resumes:
        rows.append(("resumed", 1, [(r.batch, r.batch, "resumed from a checkpoint") for r in run.resumes]))
    if rows:
        rows.insert(0, ("run", None, []))
    return rows


def _algorithm_rows(algorithm: Deeds, slot: int) -> list[Row]:
    rows: list[Row] = [(algorithm.name, None, [])]
    acts = sorted(algorithm.acts, key=lambda act: _ORDER.index(act.event) if act.event in _ORDER else len(_ORDER))
    for act in acts:
        rows.append((act.event, slot, [(a, b, _times(n)) for a, b, n in act.spans]))
    return rows if acts else []


def _joined(algorithm: Deeds, slot: int) -> Row:
    spans = [(a, b, f"{act.event}, {_times(n)}") for act in algorithm.acts for a, b, n in act.spans]
    return algorithm.name, slot, spans


def _times(number: int) -> str:
    return count(number, "time")


def _bars(run: Run, row: int, slot: int, spans: list[tuple[int, int, str]]) -> dict[str, Any]:
    first = np.array([span[0] for span in spans], dtype=np.float64)
    last = np.array([span[1] for span in spans], dtype=np.float64)
    texts = [f"batch {a:,.0f}{'' if a == b else f' to {b:,.0f}'}: {text}" for (a, b, text) in spans]
    return {"row": row, "slot": slot % 8, "xs": _span_xs(run, first, last), "text": [_safe(t) for t in texts]}


def _span_xs(run: Run, first: np.ndarray, last: np.ndarray) -> dict[str, Any]:
    """Where spans begin, and how long they are, in batches and epochs."""
    xs: dict[str, Any] = {"batch": {"base": packed(first), "length": packed(last - first)}}
    starts, ends = epochs_at(run, first), epochs_at(run, last)
    if starts is not None and ends is not None:
        xs["epoch"] = {"base": packed(starts), "length": packed(ends - starts)}
    return xs


def _safe(label: str) -> str:
    """Text for plotly, which takes some markup."""
    return label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
