"""Sections of the page about one run."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from composer.report._charts import SLOTS, Chart, Charts, Line, colored, epochs_at, packed
from composer.report._groups import Family, Group, less_is_better, results
from composer.report._html import Html, broken, count, duration, el, number, size, text, utc
from composer.report._model import AlgorithmActions, Run

_ROW = 19  # pixels
_MOST_CELLS = 1 << 21  # the cells that all heat maps of a page may have
_ORDER = (
    "init before_load after_load fit_start iteration_start epoch_start before_dataloader after_dataloader batch_start "
    "before_train_batch before_forward after_forward before_loss after_loss before_backward after_backward "
    "after_train_batch batch_end batch_checkpoint epoch_end epoch_checkpoint"
).split()

_Row = tuple[str, int | None, list[tuple[int, int, str]]]  # label, slot (None: a heading), spans with their text
_MOST_RESULTS = 20  # shown beside a checkpoint
_WORD_OF_STATE = {"there": "", "missing": "missing on disk", "removed": "removed by the run", "remote": "uploaded"}


def section(name: str, title: str, *content: Any) -> Html | None:
    """Return a section, or None if it is empty."""
    inner = text(*content)
    return el("section", el("h2", title), inner, id=name) if inner else None


def table(columns: list[Any], rows: list[list[Any]], numeric: int = 0, class_: str = "") -> Html:
    """Return a table whose last `numeric` columns are numbers."""
    first = len(columns) - numeric
    head = el("tr", [el("th", c, class_="n" if i >= first else None, scope="col") for i, c in enumerate(columns)])
    body = [
        el("tr", [el("td", cell, class_="n" if i >= first else None) for i, cell in enumerate(row)]) for row in rows
    ]
    return el("div", el("table", el("thead", head), el("tbody", body), class_=class_ or None), class_="scroll")


def status_badge(run: Run) -> Html:
    """Return an element with the status of a run."""
    return el("span", run.status, class_=f"status {run.status}")


def facts(run: Run) -> Html:
    """Return the facts below the title."""
    device, environment = run.environment.get("device", {}), run.environment
    length = [count(run.batches, "batch")] + ([count(run.epochs, "epoch")] if run.epochs else [])
    items: list[tuple[str, Any]] = [("Outcome", [status_badge(run), el("code", run.error) if run.error else None])]
    items += [("Started", utc(run.started)), ("Took", duration(run.seconds))]
    items.append(("Trained", ", ".join(length)))
    if device:
        ranks = environment.get("world_size", 1)
        where = device.get("name") or device.get("kind")
        items.append(("Device", f"{where}{f', {ranks} ranks' if ranks > 1 else ''}, {device.get('precision', '')}"))
    if run.model:
        items.append(("Model", f"{run.model['class']}, {count(run.model['parameters'], 'parameter')}"))
    if run.seed is not None:
        items.append(("Seed", str(run.seed)))
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in items], class_="facts")


def results_table(run: Run, members: list[Family]) -> Html | None:
    """Return a table of the last and best value of each metric and loss."""
    rows: list[list[Any]] = []
    group = Group(run.name, (run,))
    for name in sorted((n for f in members for n in f.members), key=evaluations_first):
        result = results(group, name)
        if result is not None:
            better = "least" if less_is_better(name) else "greatest"
            last = el("strong", number(result.mean), class_=None if math.isfinite(result.mean) else "bad")
            rows.append([el("code", broken(name)), last, number(result.best), better, f"{result.best_step:,}"])
    return table(["metric", "at the end", "best", "best is the", "at batch"], rows, numeric=4) if rows else None


def evaluations_first(name: str) -> tuple[bool, bool, str]:
    """Return a sort key of metrics: those of evaluations first, and losses last of each."""
    return "/train/" in name, name.startswith("loss"), name


def family_figure(family: Family, run: Run, charts: Charts) -> Html:
    """Return a chart of the metrics of a family, with those of training first."""
    order = sorted(family.members.items(), key=lambda item: (item[1] != "train", item[1]))
    lines = [Line(member, run.metrics[name], run, slot) for slot, (name, member) in enumerate(order)]
    key = order[0][0] if len(order) == 1 else family.key
    return charts.draw(Chart(family.title, key, lines))


def arrays_section(groups: Sequence[Group], charts: Charts) -> Html | None:
    """Return charts of the last arrays: vectors as lines, others, such as confusion matrices, as heat maps.

    The columns of a heat map are all dimensions after the first. Arrays of several groups, each of its first run, stand
    side by side in the colors of the groups, with the same range of values.
    """
    rows, left, cells = [], [], 0
    for name in dict.fromkeys(name for group in groups for name in group.runs[0].arrays):
        arrays = [(slot, group, group.runs[0].arrays.get(name)) for slot, group in enumerate(groups)]
        found = [(slot, group, array) for slot, group, array in arrays if array is not None]
        size = sum(array.size for _, _, array in found)
        if cells + size > _MOST_CELLS:
            left.append(name)
            continue
        cells += size
        finite = np.concatenate([array[np.isfinite(array)] for _, _, array in found])
        limits = [float(finite.min()), float(finite.max())] if finite.size else None
        row = []
        for slot, group, array in found:
            data: dict[str, Any] = {"kind": "array", "height": 260, "values": packed(array.ravel()), "rows": len(array)}
            data |= {"slot": slot % SLOTS, "range": limits}
            if array.ndim > 1:
                data["values"]["shape"] = f"{len(array)}, {array.size // len(array)}"
            owner = group.name if len(groups) > 1 else ""
            row.append(charts.place(data, Chart(name.removeprefix("metrics/"), owner, ())))
        rows.append(row)
    grids = rows if len(groups) > 1 else [[figure for row in rows for figure in row]]
    return section("arrays", "Arrays", [el("div", row, class_="grid") for row in grids if row], left_out(left))


def images_section(run: Run) -> Html | None:
    """Return the last images of each name."""
    parts = []
    for each in run.images:
        files = [file for file in each.files if file.is_file()]
        urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode('ascii')}" for file in files]
        drawn = [el("img", src=url, alt=f"{each.name} {index}") for index, url in enumerate(urls)]
        more = f", the first {len(files)} of {each.num_images:,}" if each.num_images > len(files) else ""
        parts.append(el("h3", f"{each.name} (batch {each.step:,}{more})"))
        parts.append(el("div", drawn, class_="images"))
    return section("images", "Images", parts)


def left_out(left: Sequence[str]) -> Html | None:
    """Return a sentence about the metrics that are not drawn."""
    if not left:
        return None
    return el("p", f"{count(len(left), 'metric')} more not drawn: ", ", ".join(left), class_="small")


# ---- algorithms ----


def algorithms_section(run: Run, charts: Charts) -> Html | None:
    """Return the timeline, the actions of each algorithm, replaced modules, and the plan."""
    timeline = _draw_timeline(run, charts)
    rows = [
        [colored(a.name, slot), actions(a), el("code", a.config, class_="config")]
        for slot, a in enumerate(run.algorithms)
    ]
    modules = [[el("code", m.before), el("code", m.after), str(m.count), _names(m.names, m.count)] for m in run.modules]
    modules += [["", el("code", broken(name)), str(number_), "added"] for name, number_ in run.modules_added.items()]
    return section(
        "algorithms",
        "Algorithms and events" if run.algorithms else "Events",
        timeline,
        [el("h3", "What each algorithm did"), table(["algorithm", "actions", "configuration"], rows)] if rows else None,
        [el("h3", "Modules replaced"), table(["before", "after", "number", "modules"], modules)] if modules else None,
        plan_table(run),
    )


def actions(algorithm: AlgorithmActions) -> Html:
    """Return what an algorithm did: its calls by event, and logged hyperparameters."""
    calls = ", ".join(f"{act.count:,} at {act.event}" for act in algorithm.acts)
    logged = [f"{key} = {value}" for key, value in algorithm.logged.items()]
    return text(
        el("div", f"Acted: {calls}" if algorithm.acts else "Did not act", class_="small"),
        [el("div", el("code", line), class_="small") for line in logged],
    )


def _names(names: tuple[str, ...], total: int) -> Html:
    shown = ", ".join(names[:6])
    rest = total - min(len(names), 6)
    return el("span", shown, f" and {rest} more" if rest > 0 else None, class_="small")


def plan_table(run: Run) -> Html | None:
    """Return the plan of the engine: one table for algorithms, one for callbacks and loggers."""
    if not run.plan:
        return None
    algorithms = [entry for entry in run.plan if entry.kind == "algorithm"]
    rest = [entry for entry in run.plan if entry.kind != "algorithm"]
    parts = []
    plan = "The engine's plan: order of the algorithms, and reasons"
    for entries, title in ((algorithms, plan), (rest, "Callbacks and loggers")):
        if entries:
            rows, before = [], ""
            for entry in entries:
                event = "" if entry.event == before else entry.event
                before = entry.event
                rows.append([el("code", event) if event else "", str(entry.order), entry.name, entry.reason])
            parts.append(el("details", el("summary", title), table(["event", "order", "name", "reason"], rows)))
    return text(parts)


def _draw_timeline(run: Run, charts: Charts) -> Html | None:
    """Return a chart of the calls of algorithms, evaluations and checkpoints over the batches; None if empty.

    Args:
        run: The run.
        charts: The chart is added here.
    """
    rows = [*_run_rows(run)]
    order = {event: index for index, event in enumerate(_ORDER)}
    for slot, algorithm in enumerate(run.algorithms):
        if algorithm.acts:
            rows.append((algorithm.name, None, []))
        for act in sorted(algorithm.acts, key=lambda act: order.get(act.event, len(order))):
            rows.append((act.event, slot, [(a, b, _times(n)) for a, b, n in act.spans]))
    if not rows:
        return None
    bars = []
    for row, (_, bar_slot, spans) in enumerate(rows):
        if bar_slot is None:
            continue
        xs = _span_xs(run, *(np.array([span[end] for span in spans], dtype=np.float64) for end in (0, 1)))
        texts = [f"batch {a:,.0f}{'' if a == b else f' to {b:,.0f}'}: {label}" for a, b, label in spans]
        bars.append({"row": row, "slot": bar_slot % SLOTS, "xs": xs, "text": [_safe(each) for each in texts]})
    end = float(max(run.batches, 1))
    data: dict[str, Any] = {
        "kind": "timeline",
        "height": len(rows) * _ROW + 62,
        "labels": [f"<b>{_safe(label)}</b>" if slot is None else _safe(label) for label, slot, _ in rows],
        "bars": bars,
        "end": _span_xs(run, np.array([end]), np.array([0.0])),
    }
    if run.epoch_starts:
        charts.has_epochs = True
    return charts.place(data, Chart("", "", (), wide=True))


def _run_rows(run: Run) -> Iterable[_Row]:
    rows: list[_Row] = []
    labels = dict.fromkeys(evaluation.label for evaluation in run.evaluations)
    for label in labels:
        evaluations = [e for e in run.evaluations if e.label == label]
        rows.append((f"evaluation {label}", 7, [(e.step, e.step, count(e.batches, "batch")) for e in evaluations]))
    if run.checkpoints:
        rows.append(("checkpoint", 7, [(c.batch, c.batch, c.name) for c in run.checkpoints]))
    if run.resumes:
        rows.append(("resumed", 1, [(r.batch, r.batch, "resumed from a checkpoint") for r in run.resumes]))
    if rows:
        rows.insert(0, ("run", None, []))
    return rows


def _times(number: int) -> str:
    return count(number, "time")


def _span_xs(run: Run, first: np.ndarray, last: np.ndarray) -> dict[str, Any]:
    """Return the start and length of spans in batches and epochs."""
    xs: dict[str, Any] = {"batch": {"base": packed(first), "length": packed(last - first)}}
    starts, ends = epochs_at(run, first), epochs_at(run, last)
    if starts is not None and ends is not None:
        xs["epoch"] = {"base": packed(starts), "length": packed(ends - starts)}
    return xs


def _safe(label: str) -> str:
    """Escape text for plotly, which interprets some markup."""
    return html.escape(label, quote=False)


# ---- hyperparameters and environment ----


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested hyperparameters, with dots in their names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def hyperparameters_section(run: Run) -> Html | None:
    """Return all hyperparameters, in groups, with a search field."""
    flat = flattened(run.hyperparameters)
    groups: dict[str, list[list[Any]]] = {}
    for name, value in sorted(flat.items()):
        head = name.replace(".", "/").partition("/")
        groups.setdefault(head[0] if head[1] else "", []).append([el("code", broken(name)), show(value)])
    tables = [
        el("div", el("h3", group or "general"), table(["hyperparameter", "value"], rows), class_="group")
        for group, rows in sorted(groups.items())
    ]
    if not tables:
        return None
    return section("hyperparameters", "Hyperparameters", tables)


def show(value: Any) -> Html:
    """Return the value of a hyperparameter as an element."""
    if isinstance(value, float):
        return el("span", number(value, 6))
    if isinstance(value, list):
        return el("span", ", ".join(str(item) for item in value) or "none")
    return el("span", "none" if value is None else str(value), class_="none" if value is None else None)


def environment_rows(run: Run) -> dict[str, str]:
    """Return machine and versions as text."""
    values = dict(run.environment)
    values.pop("packages", None)
    device = values.pop("device", {})
    rows = {f"device {key}": str(value) for key, value in device.items()}
    if "device memory_bytes" in rows:
        rows["device memory"] = size(int(rows.pop("device memory_bytes")))
    return rows | {key.replace("_", " "): str(value) for key, value in values.items() if value is not None}


def checkpoints_section(run: Run) -> Html | None:
    """Return the checkpoints, with evaluation results at the same batch."""
    rows = []
    # The keys of each dict are pairs of name and value, without duplicates and in the order of the metrics.
    evaluated: dict[int, dict[tuple[str, float], None]] = {checkpoint.batch: {} for checkpoint in run.checkpoints}
    for name, series in run.metrics.items():
        if name.startswith("metrics/") and not name.startswith("metrics/train/"):
            for index in np.flatnonzero(np.isin(series.steps, list(evaluated))):
                evaluated[int(series.steps[index])][name, float(series.values[index])] = None
    for checkpoint in run.checkpoints:
        results = list(evaluated[checkpoint.batch])
        parts = [f"{name.removeprefix('metrics/')} {number(value)}" for name, value in results[:_MOST_RESULTS]]
        parts += [f"and {len(results) - _MOST_RESULTS:,} more"] if len(results) > _MOST_RESULTS else []
        shown = ", ".join(parts)
        word = _WORD_OF_STATE[checkpoint.state]
        mark = el("span", word, class_="bad" if checkpoint.state == "missing" else "small") if word else None
        where = [el("code", checkpoint.remote or checkpoint.name), " ", mark]
        weight = "" if checkpoint.size is None else size(checkpoint.size)
        cells = [where, shown, f"{checkpoint.epoch:,}", f"{checkpoint.batch:,}", weight]
        rows.append(cells)
    if not rows:
        return None
    content = table(["checkpoint", "evaluation", "epoch", "batch", "size"], rows, numeric=3)
    return section("checkpoints", "Checkpoints", content)


def tables_section(run: Run) -> Html | None:
    """Return the logged tables and texts."""
    parts = []
    for each in run.tables:
        more = f", the first {len(each.rows):,} of {each.num_rows:,} rows" if each.num_rows > len(each.rows) else ""
        rows = [[str(cell) for cell in row] for row in each.rows]
        content = table(list(each.columns), rows)
        parts.append(el("details", el("summary", f"{each.name} (batch {each.step:,}{more})"), content))
    texts = [[el("code", broken(name)), value] for name, value in run.texts.items()]
    return section("tables", "Tables", parts, table(["logged text", "last value"], texts) if texts else None)
