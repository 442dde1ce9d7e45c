"""The page about one run or several."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from string import Template

from composer.report import _sections as single
from composer.report._charts import Charts, group_names
from composer.report._compare import (
    algorithms_comparison,
    comparison_figures,
    environment_comparison,
    hyperparameters_comparison,
    results_comparison,
    runs_table,
)
from composer.report._groups import Family, Group, families, group_runs
from composer.report._html import Html, count, duration, el, json_script, text
from composer.report._model import Run
from composer.report._read import find_runs, read_run

_TITLES = {
    "learning": ("curves", "Loss and metrics"),
    "rate": ("rate", "Learning rate"),
    "speed": ("speed", "Throughput and time"),
    "machine": ("machine", "Memory and machine"),
    "other": ("others", "Other metrics"),
}
_MOST_CHARTS = 60  # drawn in a section: a browser stalls over thousands
_MOST_LINES = 500  # drawn in a chart


def write_report(
    folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str] = "report.html",
    *,
    refresh: int = 0,
) -> Path:
    """Write a page about a run, or one that compares several. The page needs no network.

    Args:
        folders: One or several folders of runs, or folders that contain them.
        output: The file to write, which a browser never finds half written; missing folders are created.
        refresh: Seconds after which a browser loads the page again; 0: never.

    Returns:
        The file.

    Raises:
        RunNotFoundError: A folder has no run.
        ValueError: `folders` is empty, or a run was recorded by a later release.

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
        >>> write_report(folder, f"{folder}/report.html").name
        'report.html'
    """
    return write_page([read_run(folder) for folder in _found(folders)], output, refresh)


def write_page(runs: Sequence[Run], output: str | os.PathLike[str], refresh: int = 0) -> Path:
    """Write the page of `write_report` about runs that are read already."""
    page, path = render(runs, refresh), Path(output).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(page, encoding="utf-8")
    written.replace(path)
    return path


class Report:
    """The page of `write_report` in a notebook: `Report("my-run")` as the last line of a cell shows it.

    Runs are read each time that it is shown, so for a run that goes on, run the cell again. The output of the cell
    holds the whole page, about 5 MB.

    Args:
        folders: One or several folders of runs, or folders that contain them; several runs are compared.
        height: The height of the page in the notebook, in pixels.

    Raises:
        RunNotFoundError: A folder has no run.
        ValueError: `folders` is empty.
    """

    def __init__(
        self, folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, height: int = 800
    ) -> None:
        self.folders = _found(folders)
        self.height = height

    def __repr__(self) -> str:
        return f"Report({[str(folder) for folder in self.folders]})"

    def _repr_html_(self) -> str:
        page = render([read_run(folder) for folder in self.folders])
        # Without this, a link to a section would load the notebook's own address into the frame.
        page = page.replace("<head>", '<head><base href="about:srcdoc">', 1)
        return el("iframe", srcdoc=page, width="100%", height=self.height, style="border: 0")


def _found(folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the folders of the runs in some folders."""
    folders = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    if not folders:
        raise ValueError("`folders` must have at least one folder of a run, got none.")
    return find_runs(folders)


def render(runs: Sequence[Run], refresh: int = 0) -> str:
    """Return the page about one run or several."""
    groups = group_runs(runs)
    all_families = families({name for run in runs for name in run.metrics})
    lines = sum(len(run.metrics) for run in runs)
    charts = Charts(lines, max(run.seconds for run in runs))
    single_run = runs[0] if len(runs) == 1 else None
    parts = _single(single_run, all_families, charts) if single_run else _comparison(groups, all_families, charts)
    sections = [part for part in parts if part is not None]
    title = runs[0].name if single_run else " / ".join(group.name for group in groups[:4])
    header = _header(single_run, groups, title)
    body = [header, _bar(sections, charts), el("main", sections)]
    return document(f"{title} - composer report", body, charts, refresh)


def _header(run: Run | None, groups: Sequence[Group], title: str) -> Html:
    runs = [each for group in groups for each in group.runs]
    kind = "Training run" if run else f"Comparison of {count(len(runs), 'run')}"
    if run is None and len(groups) < len(runs):
        kind += f" in {count(len(groups), 'group')}"
    notes = list(dict.fromkeys(note for each in runs for note in each.notes))
    if run:
        notes += [
            f"Resumed at batch {r.batch:,} (epoch {r.epoch:,}), {duration(r.seconds)} into the run"
            + (f"; {count(r.superseded, 'batch')} trained again, without their first attempt." if r.superseded else ".")
            for r in run.resumes
        ]
    return el(
        "header",
        el("p", kind, class_="kind"),
        el("h1", title) if run else el("h1", group_names(groups), class_="keys"),
        single.facts(run) if run else None,
        [el("p", note, class_="note") for note in notes],
        id="top",
    )


def _bar(sections: Sequence[Html], charts: Charts) -> Html:
    """Return the navigation bar: links to the sections, and the choice of the x axis."""
    named = [found for part in sections for found in re.findall(r'<section id="(\w+)"><h2>(.*?)</h2>', part)[:1]]
    links = [el("a", Html(title), href=f"#{name}") for name, title in named]
    modes = [("batch", "batch"), *([("epoch", "epoch")] if charts.has_epochs else [])]
    modes += [("time", charts.time_unit[0])] if charts.has_time else []
    buttons = [
        el("button", label, type="button", data_x=mode, aria_pressed="true" if mode == "batch" else "false")
        for mode, label in modes
    ]
    choice = el("div", el("span", "x axis"), buttons, class_="choice", role="group", aria_label="x axis")
    return el("nav", el("div", links, class_="links"), choice if len(modes) > 1 and charts.drawn else None)


def _figures(figures: Sequence[Html], key: str) -> Html | None:
    """Return the charts of a section: large ones if there are few about learning, otherwise small ones in a grid."""
    if not figures:
        return None
    large = key == "learning" and len(figures) in (1, 2, 4)
    return el("div", figures, class_="grid large" if large else "grid")


def _single(run: Run, all_families: Sequence[Family], charts: Charts) -> list[Html | None]:
    learning = [family for family in all_families if family.section == "learning"]
    curves: list[Html | None] = []
    for key, (name, title) in _TITLES.items():
        shown, left = _drawn(all_families, key, in_one_chart=True)
        figures = [single.family_figure(family, run, charts) for family in shown]
        curves.append(single.section(name, title, _figures(figures, key), single.left_out(left)))
    packages = [[el("code", name), version] for name, version in run.environment.get("packages", {}).items()]
    environment = [[key, value] for key, value in single.environment_rows(run).items()]
    return [
        single.section("results", "Results", single.results_table(run, learning)),
        curves[0],
        single.arrays_section(group_runs([run]), charts),
        single.images_section(run),
        single.algorithms_section(run, charts),
        *curves[1:],
        single.tables_section(run),
        single.checkpoints_section(run),
        single.hyperparameters_section(run),
        single.section(
            "environment",
            "Environment",
            single.table(["", ""], environment, class_="plain") if environment else None,
            el(
                "details",
                el("summary", f"{count(len(packages), 'package')} of composer"),
                single.table(["", ""], packages),
            )
            if packages
            else None,
        ),
    ]


def _drawn(all_families: Sequence[Family], section: str, *, in_one_chart: bool) -> tuple[list[Family], list[str]]:
    """Return the families of a section to draw, and the names of the metrics beyond the limit.

    Args:
        all_families: The metrics of all sections.
        section: The section.
        in_one_chart: The metrics of a family share a chart, as for a single run.
    """
    drawn: list[Family] = []
    left: list[str] = []
    num_charts = 0
    for family in all_families:
        if family.section != section:
            continue
        names = list(family.members)
        room = _MOST_CHARTS - num_charts
        if in_one_chart:
            room = _MOST_LINES if room else 0
        left += names[room:]
        if room:
            drawn.append(replace(family, members={name: family.members[name] for name in names[:room]}))
            num_charts += 1 if in_one_chart else len(names[:room])
    return drawn, left


def _comparison(groups: Sequence[Group], all_families: Sequence[Family], charts: Charts) -> list[Html | None]:
    curves = []
    for key, (name, title) in _TITLES.items():
        shown, left = _drawn(all_families, key, in_one_chart=False)
        figures = comparison_figures(groups, shown, charts)
        curves.append(single.section(name, title, _figures(figures, key), single.left_out(left)))
    return [
        single.section("results", "Results", results_comparison(groups, all_families)),
        curves[0],
        single.arrays_section(groups, charts),
        single.section("runs", "Runs", runs_table(groups)),
        algorithms_comparison(groups),
        hyperparameters_comparison(groups),
        *curves[1:],
        environment_comparison(groups),
    ]


def document(title: str, body: Sequence[Html], charts: Charts, refresh: int = 0) -> str:
    """Return the page. Its policy allows its own scripts only, and no requests."""
    assets = files("composer.report") / "assets"
    template, style, code = ((assets / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    scripts, data, noscript = [], "", Html("")
    if charts.drawn:
        scripts = [import_module("plotly.offline").get_plotlyjs().replace("\r\n", "\n"), code]
        noscript = el("noscript", el("p", "The charts need JavaScript; the tables do not.", class_="note"))
        units = {"batch": "batch", "epoch": "epoch", "time": charts.time_unit[0]}
        data = json_script({"charts": charts.drawn, "units": units}, "data")
    digests = [base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return Template(template).substitute(
        title=text(title),
        refresh=el("meta", http_equiv="refresh", content=refresh) if refresh else "",
        hashes=hashes,
        style=style,
        noscript=noscript,
        body=text(list(body)),
        scripts=data + "".join(f"<script>{script}</script>" for script in scripts),
    )
