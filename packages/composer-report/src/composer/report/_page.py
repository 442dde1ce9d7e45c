"""The whole page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from typing import Any

from composer.report import _sections as single
from composer.report._charts import SLOTS, Charts
from composer.report._compare import (
    algorithms_comparison,
    comparison_figures,
    environment_comparison,
    hyperparameters_comparison,
    results_comparison,
    runs_table,
)
from composer.report._groups import Group, group_runs
from composer.report._html import Html, count, duration, el, json_script
from composer.report._model import Run
from composer.report._select import Family, families
from composer.report._speed import RATE, rate_family, with_rates, without_repetition

__all__ = ["render"]

_TITLES = {
    "learning": ("curves", "Loss and metrics"),
    "rate": ("rate", "Learning rate"),
    "speed": ("speed", "Throughput and time"),
    "machine": ("machine", "Memory and machine"),
}
_NAV = {
    "results": "Results",
    "curves": "Curves",
    "runs": "Runs",
    "algorithms": "Algorithms",
    "rate": "Learning rate",
    "speed": "Throughput",
    "machine": "Machine",
    "others": "Other metrics",
    "tables": "Tables",
    "checkpoints": "Checkpoints",
    "hyperparameters": "Hyperparameters",
    "environment": "Environment",
}
_MOST_CHARTS = 60  # in a section: a browser stalls over thousands
_MOST_LINES = 500  # in a chart


def render(runs: Sequence[Run]) -> str:
    """The page of a run, or of several.

    Args:
        runs: At least one.
    """
    runs = [with_rates(without_repetition(run)) for run in runs]
    groups = group_runs(runs)
    found = [*families({name for run in runs for name in run.metrics} - {RATE}), *rate_family(runs)]
    lines = sum(len(run.metrics) for run in runs)
    charts = Charts(lines, max(run.seconds for run in runs))
    single_run = runs[0] if len(runs) == 1 else None
    parts = _single(single_run, found, charts) if single_run else _comparison(groups, found, charts)
    sections = [part for part in parts if part is not None]
    title = runs[0].name if single_run else " / ".join(group.name for group in groups[:4])
    header = _header(single_run, groups, title)
    return _document(f"{title} - composer report", [header, _bar(sections, charts), el("main", sections)], charts)


def _header(run: Run | None, groups: Sequence[Group], title: str) -> Html:
    runs = [each for group in groups for each in group.runs]
    kind = "Training run" if run else f"Comparison of {count(len(runs), 'run')}"
    if run is None and len(groups) < len(runs):
        kind += f" in {count(len(groups), 'group')}"
    noted = list(dict.fromkeys(note for each in runs for note in each.notes))
    if run:
        noted += [
            f"Resumed at batch {r.batch:,} (epoch {r.epoch:,}), {duration(r.seconds)} into the run"
            + (
                f"; {count(r.superseded, 'batch')} trained again, the first attempt at them is left out."
                if r.superseded
                else "."
            )
            for r in run.resumes
        ]
    keys = [el("span", group.name, class_=f"key c{i % SLOTS}") for i, group in enumerate(groups)]
    return el(
        "header",
        el("p", kind, class_="kind"),
        el("h1", title) if run else el("h1", keys, class_="keys"),
        single.facts(run) if run else None,
        [el("p", note, class_="note") for note in noted],
        id="top",
    )


def _bar(sections: Sequence[Html], charts: Charts) -> Html:
    """The bar that stays on top: links to the sections, and the choice of the x axis."""
    links = []
    for part in sections:
        name = part.partition('id="')[2].partition('"')[0]
        links.append(el("a", _NAV.get(name, name), href=f"#{name}"))
    modes = [("batch", "batch"), *([("epoch", "epoch")] if charts.has_epochs else [])]
    modes += [("time", charts.time_unit[0])] if charts.has_time else []
    buttons = [
        el("button", label, type="button", data_x=mode, aria_pressed="true" if mode == "batch" else "false")
        for mode, label in modes
    ]
    choice = el("div", el("span", "x axis"), buttons, class_="choice", role="group", aria_label="x axis")
    return el("nav", el("div", links, class_="links"), choice if len(modes) > 1 and charts.drawn else None)


def _figures(figures: Sequence[Html], key: str) -> Html | None:
    """The charts of a section: one or two large ones of what was learned, all others small and side by side."""
    if not figures:
        return None
    large = key == "learning" and len(figures) in (1, 2, 4)
    return el("div", figures, class_="grid large" if large else "grid")


def _single(run: Run, found: Sequence[Family], charts: Charts) -> list[Html | None]:
    by_section = {key: [f for f in found if f.section == key] for key in (*_TITLES, "other")}
    curves: list[Html | None] = []
    for key, (name, title) in _TITLES.items():
        shown, left = _drawn(by_section[key], in_one_chart=True)
        figures = [single.family_figure(family, run, charts) for family in shown]
        times = _times(run) if key == "speed" else None
        curves.append(single.section(name, title, _figures(figures, key), _left_out(left), times))
    shown, left = _drawn(by_section["other"], in_one_chart=True)
    others = [single.family_figure(family, run, charts) for family in shown]
    packages = run.environment.get("packages", {})
    environment = [[key, value] for key, value in single.environment_rows(run).items()]
    return [
        single.section("results", "Results", single.results_table(run, by_section["learning"])),
        curves[0],
        single.algorithms_section(run, charts),
        *curves[1:],
        single.section("others", "Other metrics", _figures(others, "other"), _left_out(left)),
        single.tables_section(run),
        single.checkpoints_section(run),
        single.hyperparameters_section(run),
        single.section(
            "environment",
            "Environment",
            single.table(["", ""], environment, class_="plain") if environment else None,
            _packages(packages) if packages else None,
        ),
    ]


def _times(run: Run) -> Html | None:
    if run.source != "recorder" or not run.batches:
        return None
    evaluating = sum(evaluation.duration for evaluation in run.evaluations)
    rows: list[list[Any]] = [["whole run", duration(run.seconds)]]
    if run.evaluations:
        rows.append([f"of it, {count(len(run.evaluations), 'evaluation')}", duration(evaluating)])
    return single.table(["", "time"], rows, numeric=1, class_="plain")


def _drawn(found: Sequence[Family], *, in_one_chart: bool) -> tuple[list[Family], list[str]]:
    """Return what is drawn of a section, and the names of the metrics that are not.

    Args:
        found: The metrics of the section.
        in_one_chart: Whether the metrics of a family share a chart, as those of a single run do.
    """
    drawn: list[Family] = []
    left: list[str] = []
    num_charts = 0
    for family in found:
        names = list(family.members)
        room = _MOST_CHARTS - num_charts
        if in_one_chart:
            room = _MOST_LINES if room else 0
        left += names[room:]
        if room:
            drawn.append(replace(family, members={name: family.members[name] for name in names[:room]}))
            num_charts += 1 if in_one_chart else len(names[:room])
    return drawn, left


def _left_out(left: Sequence[str]) -> Html | None:
    if not left:
        return None
    return el("p", f"{count(len(left), 'metric')} more not drawn: ", ", ".join(left), class_="small")


def _packages(packages: dict[str, str]) -> Html:
    rows = [[el("code", name), version] for name, version in packages.items()]
    return el("details", el("summary", f"{count(len(rows), 'package')} of composer"), single.table(["", ""], rows))


def _comparison(groups: Sequence[Group], found: Sequence[Family], charts: Charts) -> list[Html | None]:
    curves = []
    for key, (name, title) in _TITLES.items():
        shown, left = _drawn([f for f in found if f.section == key], in_one_chart=False)
        curves.append(
            single.section(name, title, _figures(comparison_figures(groups, shown, charts), key), _left_out(left))
        )
    shown, left = _drawn([f for f in found if f.section == "other"], in_one_chart=False)
    figures = comparison_figures(groups, shown, charts)
    return [
        single.section("results", "Results", results_comparison(groups, found)),
        curves[0],
        single.section("runs", "Runs", runs_table(groups)),
        algorithms_comparison(groups),
        hyperparameters_comparison(groups),
        *curves[1:],
        single.section("others", "Other metrics", _figures(figures, "other"), _left_out(left)),
        environment_comparison(groups),
    ]


def _document(title: str, body: Sequence[Html], charts: Charts) -> str:
    """The page, whose policy lets it run its own scripts and nothing else, and fetch nothing."""
    assets = files("composer.report") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    scripts = (
        [
            import_module("plotly.offline").get_plotlyjs().replace("\r\n", "\n"),
            (assets / "page.js").read_text(encoding="utf-8"),
        ]
        if charts.drawn
        else []
    )
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; form-action 'none'"
    units = {"batch": "batch", "epoch": "epoch", "time": charts.time_unit[0]}
    head = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        Html(f"<style>{style}</style>"),
    ]
    data = json_script({"charts": charts.drawn, "units": units}, "data")
    noscript = Html("<noscript><p class='note'>The charts need JavaScript; the tables do not.</p></noscript>")
    code = [data, *(Html(f"<script>{script}</script>") for script in scripts)] if scripts else []
    return f"<!DOCTYPE html>\n{el('html', el('head', head), el('body', noscript, list(body), code), lang='en')}\n"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
