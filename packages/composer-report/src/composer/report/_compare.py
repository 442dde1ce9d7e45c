"""Sections of the page about several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from composer.report._charts import Chart, Charts, colored, group_names, mean_line
from composer.report._groups import Family, Group, less_is_better, results, show_group
from composer.report._html import Html, broken, count, duration, el, text, utc
from composer.report._model import Run
from composer.report._sections import (
    actions,
    environment_rows,
    evaluations_first,
    flattened,
    section,
    show,
    status_badge,
    table,
)


def runs_table(groups: Sequence[Group]) -> Html:
    """Return a table with a row for each run."""
    rows = []
    for slot, group in enumerate(groups):
        for run in group.runs:
            name = colored(group.name, slot)
            folder = el("code", run.folder.name, class_="nowrap")
            cells: list[Any] = [name, folder, "" if run.seed is None else str(run.seed)]
            ended = text(status_badge(run), el("div", run.error, class_="small") if run.error else None)
            started = el("span", utc(run.started), class_="nowrap")
            cells += [ended, started, f"{run.batches:,}", duration(run.seconds)]
            rows.append(cells)
    return table(["run", "folder", "seed", "outcome", "started", "batches", "took"], rows, numeric=2)


def results_comparison(groups: Sequence[Group], families: Sequence[Family]) -> Html | None:
    """Return a table of the results of each group, with the best in bold."""
    names = [n for f in families if f.section == "learning" for n in f.members]
    rows: list[list[Any]] = []
    for name in sorted(names, key=evaluations_first):
        outcomes = [results(group, name) for group in groups]
        means = [math.nan if each is None else each.mean for each in outcomes]
        texts = [show_group(each) for each in outcomes]
        if "/train/" in name:  # algorithms change the training targets, so these are not comparable
            rows.append([el("code", broken(name)), *_unmarked(means, texts)])
        else:
            rows.append([el("code", broken(name)), *_marked(means, texts, less_is_better(name))])
    took = [_mean([run.seconds for run in group.runs]) for group in groups]
    if any(math.isfinite(each) for each in took):
        rows.append(["duration", *_marked(took, [duration(t) if math.isfinite(t) else "" for t in took], True)])
    several = [len(group.runs) for group in groups if len(group.runs) > 1]
    caption = "At the end of each run. "
    if several:
        runs = f"{several[0]} runs" if len(set(several)) == 1 else "the runs of each"
        caption = f"At the end; mean and standard deviation over {runs}. "
    return text(
        table(["", *group_names(groups)], rows, numeric=len(groups), class_="results"),
        el("p", caption, "The best mean is set in bold; results of training are not ranked.", class_="small"),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _marked(values: Sequence[float], texts: Sequence[str], less: bool) -> list[Html]:
    known = [value for value in values if math.isfinite(value)]
    best = (min(known) if less else max(known)) if len(known) > 1 and len(set(texts)) > 1 else None
    return [
        el("strong", shown, class_="best") if value == best else cell
        for value, shown, cell in zip(values, texts, _unmarked(values, texts), strict=True)
    ]


def _unmarked(values: Sequence[float], texts: Sequence[str]) -> list[Html]:
    return [
        el("span", shown, class_="bad" if shown and not math.isfinite(value) else None)
        for value, shown in zip(values, texts, strict=True)
    ]


def comparison_figures(groups: Sequence[Group], families: Sequence[Family], charts: Charts) -> list[Html]:
    """Return a chart for each metric, with a color for each group."""
    figures = []
    for family in families:
        for name in sorted(family.members, key=lambda n: ("/train/" in n, n)):
            lines = [line for slot, group in enumerate(groups) for line in mean_line(group, name, slot)]
            label = family.members[name]
            title = family.title if len(family.members) == 1 else f"{family.title}, {label}"
            figures.append(charts.draw(Chart(title, name, lines)))
    return figures


def algorithms_comparison(groups: Sequence[Group]) -> Html | None:
    """Return the actions of each algorithm in the first run of each group."""
    names = dict.fromkeys(a.name for group in groups for run in group.runs for a in run.algorithms)
    if not names:
        return None
    rows = []
    for name in names:
        cells: list[Any] = [el("strong", name)]
        for group in groups:
            matches = [a for a in group.runs[0].algorithms if a.name == name]
            cells.append(actions(replace(matches[0], logged={})) if matches else el("span", "not used", class_="none"))
        rows.append(cells)
    of = " (in the first run of each)" if any(len(group.runs) > 1 for group in groups) else ""
    return section(
        "algorithms",
        f"What the algorithms did{of}",
        table(["algorithm", *group_names(groups)], rows),
        el("h3", "Order of the algorithms at each event"),
        _difference(groups, _order_by_event, "event"),
    )


def _order_by_event(run: Run) -> dict[str, Any]:
    """Return the algorithms of the engine's plan in their order, by event."""
    names: dict[str, list[str]] = {}
    for entry in run.plan:
        if entry.kind == "algorithm":
            names.setdefault(entry.event, []).append(entry.name)
    return dict(names)


def _values(groups: Sequence[Group], of: Callable[[Run], dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return the distinct values of each group, by name."""
    tables = [[of(run) for run in group.runs] for group in groups]
    names = dict.fromkeys(name for runs in tables for values in runs for name in values)
    distinct_values: dict[str, list[list[Any]]] = {}
    for name in sorted(names):
        cells = []
        for runs in tables:
            distinct: list[Any] = []
            for values in runs:
                if values.get(name, _ABSENT) not in distinct:
                    distinct.append(values.get(name, _ABSENT))
            cells.append(distinct)
        distinct_values[name] = cells
    return distinct_values


_ABSENT = "\0"


def _difference(groups: Sequence[Group], of: Callable[[Run], dict[str, Any]], what: str) -> Html | None:
    """Return a table of the values that differ, and one of those that are the same in all runs."""
    values = _values(groups, of)
    if not values:
        return None
    same = {key: cells for key, cells in values.items() if all(cell == cells[0] and len(cell) == 1 for cell in cells)}
    differing = [(key, cells) for key, cells in values.items() if key not in same]
    differing.sort(key=lambda item: all(cell == item[1][0] for cell in item[1]))  # differences within groups come last
    rows = [[el("code", broken(key)), *map(_distinct, cells)] for key, cells in differing]
    common = [[el("code", broken(key)), show(cells[0][0])] for key, cells in same.items()]
    return text(
        table([what, *group_names(groups)], rows) if rows else el("p", "No difference between the runs."),
        el("details", el("summary", f"{count(len(common), what)} the same in all runs"), table([what, "value"], common))
        if common
        else None,
    )


def _distinct(values: list[Any]) -> Html:
    shown = [el("span", "not set", class_="none") if value == _ABSENT else show(value) for value in values[:6]]
    joined = [part for value in shown for part in (", ", value)][1:]
    return text(joined, f" and {len(values) - 6} more" if len(values) > 6 else None)


def hyperparameters_comparison(groups: Sequence[Group]) -> Html | None:
    """Return the hyperparameters that differ, then the others."""
    content = _difference(groups, lambda run: flattened(run.hyperparameters), "hyperparameter")
    return section("hyperparameters", "Hyperparameters", content)


def environment_comparison(groups: Sequence[Group]) -> Html | None:
    """Return the machine and versions that differ, then the others."""
    content = _difference(groups, _properties, "property")
    return section("environment", "Environment", content)


def _properties(run: Run) -> dict[str, Any]:
    packages = run.environment.get("packages", {})
    return environment_rows(run) | {f"{name} (package)": version for name, version in packages.items()}
