"""The sections of the page of one run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from composer.report._charts import Chart, Charts, Line
from composer.report._groups import Group, less_is_better, results
from composer.report._html import Html, broken, count, duration, el, number, size, text, utc
from composer.report._model import Deeds, Run
from composer.report._select import Family
from composer.report._timeline import draw_timeline

__all__ = [
    "STATUS",
    "algorithms_section",
    "checkpoints_section",
    "environment_rows",
    "facts",
    "family_figure",
    "flattened",
    "hyperparameters_section",
    "plan_table",
    "results_table",
    "section",
    "status_badge",
    "table",
    "tables_section",
]

STATUS = {
    "finished": "finished",
    "stopped": "stopped before its end",
    "crashed": "crashed",
    "unfinished": "no end recorded",
    "unused": "not trained",
}
_MOST_RESULTS = 20  # of an evaluation, beside a checkpoint
_WORD_OF_STATE = {"there": "", "missing": "missing on disk", "removed": "removed by the run", "remote": "uploaded"}


def section(name: str, title: str, *content: Any) -> Html | None:
    """A section; None if it would be empty."""
    inner = text(*content)
    return el("section", el("h2", title), inner, id=name) if inner else None


def table(columns: list[Any], rows: list[list[Any]], numeric: int = 0, class_: str = "") -> Html:
    """A table whose last `numeric` columns are numbers."""
    first = len(columns) - numeric
    head = el("tr", [el("th", c, class_="n" if i >= first else None, scope="col") for i, c in enumerate(columns)])
    body = [
        el("tr", [el("td", cell, class_="n" if i >= first else None) for i, cell in enumerate(row)]) for row in rows
    ]
    return el("div", el("table", el("thead", head), el("tbody", body), class_=class_ or None), class_="scroll")


def status_badge(run: Run) -> Html:
    """How a run ended."""
    return el("span", STATUS.get(run.status, run.status), class_=f"status {run.status}")


def facts(run: Run) -> Html:
    """The figures below the title."""
    device, environment = run.environment.get("device", {}), run.environment
    length = [count(run.batches, "batch")] + ([count(run.epochs, "epoch")] if run.epochs else [])
    items: list[tuple[str, Any]] = [("Outcome", [status_badge(run), el("code", run.error) if run.error else None])]
    if run.source == "recorder":
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
    """The last and best value of each metric and loss."""
    rows: list[list[Any]] = []
    group = Group(run.name, (run,))
    for name in sorted((n for f in members for n in f.members), key=_evaluations_first):
        result = results(group, name)
        if result is not None:
            better = "least" if less_is_better(name) else "greatest"
            last = el("strong", number(result.mean)) if math.isfinite(result.mean) else _bad(result.mean)
            rows.append([el("code", broken(name)), last, number(result.best), better, f"{result.best_step:,}"])
    return table(["metric", "at the end", "best", "best is the", "at batch"], rows, numeric=4) if rows else None


def _evaluations_first(name: str) -> tuple[bool, bool, str]:
    return "/train/" in name, name.startswith("loss"), name


def _bad(value: float) -> Html:
    return el("strong", number(value), class_="bad")


def family_figure(family: Family, run: Run, charts: Charts) -> Html:
    """A chart of metrics that belong together. Those of training come first."""
    order = sorted(family.members.items(), key=lambda item: (item[1] != "train", item[1]))
    lines = [Line(member, run.metrics[name], run, slot) for slot, (name, member) in enumerate(order)]
    key = order[0][0] if len(order) == 1 else family.key
    return charts.draw(Chart(family.title, key, lines))


# ---- algorithms ----


def algorithms_section(run: Run, charts: Charts) -> Html | None:
    """What each algorithm did and when, modules that were replaced, and the plan."""
    slots = {algorithm.name: index for index, algorithm in enumerate(run.algorithms)}
    timeline = draw_timeline(run, charts, slots)
    rows = [[_name(a, slots[a.name]), _deed(a), el("code", a.config, class_="config")] for a in run.algorithms]
    modules = [[el("code", m.before), el("code", m.after), str(m.count), _names(m.names, m.count)] for m in run.modules]
    modules += [["", el("code", broken(name)), str(number_), "added"] for name, number_ in run.modules_added.items()]
    return section(
        "algorithms",
        "Algorithms and events" if run.algorithms else "Events",
        timeline,
        [el("h3", "What each algorithm did"), table(["algorithm", "what it did", "made as"], rows)] if rows else None,
        [el("h3", "Modules replaced"), table(["before", "after", "modules", "which"], modules)] if modules else None,
        plan_table(run),
    )


def _name(algorithm: Deeds, slot: int) -> Html:
    return el("span", algorithm.name, class_=f"key c{slot % 8}")


def _deed(algorithm: Deeds) -> Html:
    counted = ", ".join(f"{act.count:,} at {act.event}" for act in algorithm.acts) or "did not act"
    logged = [f"{key} = {value}" for key, value in algorithm.logged.items()]
    return text(
        el("div", f"{algorithm.told[:1].upper()}{algorithm.told[1:]}.") if algorithm.told else None,
        el("div", f"Acted: {counted}" if algorithm.acts else "Did not act", class_="small"),
        [el("div", el("code", line), class_="small") for line in logged],
    )


def _names(names: tuple[str, ...], total: int) -> Html:
    shown = ", ".join(names[:6])
    rest = total - min(len(names), 6)
    return el("span", shown, f" and {rest} more" if rest > 0 else None, class_="small")


def plan_table(run: Run) -> Html | None:
    """The plan of the engine: algorithms at once, callbacks and loggers on demand."""
    if not run.plan:
        return None
    kept = [entry for entry in run.plan if entry.kind == "algorithm"]
    rest = [entry for entry in run.plan if entry.kind != "algorithm"]
    parts = []
    for entries, title in ((kept, "The engine's plan: order of the algorithms, and why"), (rest, "Callbacks, loggers")):
        if entries:
            rows, before = [], ""
            for entry in entries:
                event = "" if entry.event == before else entry.event
                before = entry.event
                rows.append([el("code", event) if event else "", str(entry.order), entry.name, entry.reason])
            parts.append(el("details", el("summary", title), table(["event", "order", "who", "why there"], rows)))
    return text(parts)


# ---- hyperparameters and environment ----


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters as one level, with dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def hyperparameters_section(run: Run) -> Html | None:
    """All hyperparameters, in groups, with a field to search."""
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
    return section("hyperparameters", "Hyperparameters", search("hyperparameters") if len(flat) > 12 else None, tables)


def search(name: str) -> Html:
    """A field that hides the rows of a section that do not hold what is typed."""
    return el(
        "input", type="search", placeholder="Search", aria_label=f"Search {name}", data_filter=name, class_="search"
    )


def show(value: Any) -> Html:
    """The value of a hyperparameter."""
    if isinstance(value, float):
        return el("span", number(value, 6))
    if isinstance(value, list):
        return el("span", ", ".join(str(item) for item in value) or "none")
    return el("span", "none" if value is None else str(value), class_="none" if value is None else None)


def environment_rows(run: Run) -> dict[str, str]:
    """Machine and versions as text."""
    values = dict(run.environment)
    values.pop("packages", None)
    device = values.pop("device", {})
    rows = {f"device {key}": str(value) for key, value in device.items()}
    if "device memory_bytes" in rows:
        rows["device memory"] = size(int(rows.pop("device memory_bytes")))
    return rows | {key.replace("_", " "): str(value) for key, value in values.items() if value is not None}


def checkpoints_section(run: Run) -> Html | None:
    """The checkpoints, with what evaluation found at the same batch."""
    rows = []
    found = _evaluated_at(run, {checkpoint.batch for checkpoint in run.checkpoints})
    for checkpoint in run.checkpoints:
        results = list(found[checkpoint.batch])
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
    content = table(["checkpoint", "evaluation there", "epoch", "batch", "size"], rows, numeric=3)
    return section("checkpoints", "Checkpoints", content)


def _evaluated_at(run: Run, batches: set[int]) -> dict[int, dict[tuple[str, float], None]]:
    """Return what evaluations found at some batches: by batch, pairs of name and value without repetition."""
    found: dict[int, dict[tuple[str, float], None]] = {batch: {} for batch in batches}
    for name, series in run.metrics.items():
        if name.startswith("metrics/") and not name.startswith("metrics/train/"):
            for index in np.flatnonzero(np.isin(series.steps, list(batches))):
                found[int(series.steps[index])][name, float(series.values[index])] = None
    return found


def tables_section(run: Run) -> Html | None:
    """What was logged as a table."""
    shown = [each for each in run.tables if each.name != "algorithms"]
    parts = []
    for each in shown:
        more = f", the first {len(each.rows):,} of {each.num_rows:,} rows" if each.num_rows > len(each.rows) else ""
        rows = [[str(cell) for cell in row] for row in each.rows]
        content = table(list(each.columns), rows)
        parts.append(el("details", el("summary", f"{each.name} (batch {each.step:,}{more})"), content))
    texts = [[el("code", broken(name)), value] for name, value in run.texts.items()]
    return section("tables", "Tables", parts, table(["logged as text", "last"], texts) if texts else None)
