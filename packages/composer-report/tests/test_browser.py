"""The page in a browser: headless Chromium draws it, and reports what it finds there."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer.report import Report, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {' or '.join(BROWSERS)} on the PATH")

SWITCHES = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--dump-dom"]
SWITCHES += ["--allow-file-access-from-files", "--virtual-time-budget=120000"]

# Holds the page in a frame, uses it as a reader would, and leaves what it saw in its own text.
WATCHER = """<!DOCTYPE html>
<iframe id="frame" style="width:{width}px;height:900px;border:0"></iframe><pre id="seen"></pre>
<script>
const seen = {{errors: []}};
const frame = document.getElementById("frame");
const wait = async (condition) => {{
  for (let i = 0; i < 400 && !condition(); i++) await new Promise((done) => setTimeout(done, 20));
}};
frame.onload = async () => {{
  const view = frame.contentWindow, page = frame.contentDocument, all = (q) => [...page.querySelectorAll(q)];
  view.alert = () => seen.errors.push("alert");
  view.addEventListener("error", (event) => seen.errors.push(event.message));
  const drawn = () => wait(() => page.documentElement.dataset.drawn !== undefined);
  seen.at_once = all(".chart .main-svg").length;
  await drawn();
  seen.drawn = Number(page.documentElement.dataset.drawn);
  seen.charts = all(".chart").length;
  seen.curves = all(".chart .scatterlayer path.js-line").filter((p) => p.getAttribute("d").length > 5).length;
  seen.bars = all(".chart .barlayer .point path").length;
  seen.ticks = all(".chart .ytick text").map((t) => t.textContent);
  seen.matrices = all(".chart").filter((c) => c.data[0].type === "heatmap")
    .map((c) => [c.data[0].zmin, c.data[0].zmax, Math.round(c.getBoundingClientRect().top)]);
  seen.crosses = all(".chart .scatterlayer .points path").length;
  seen.heading = page.querySelector("h1").textContent;
  seen.overflow = page.documentElement.scrollWidth > page.documentElement.clientWidth;
  seen.resources = view.performance.getEntriesByType("resource").map((r) => r.name);
  const titles = () => all(".chart .xtitle").map((t) => t.textContent);
  seen.before = [...new Set(titles())];
  for (const mode of ["epoch", "time"]) {{
    const button = page.querySelector(`[data-x=${{mode}}]`);
    if (button) {{ button.click(); await drawn(); seen[mode] = titles(); }}
  }}
  const log = page.querySelector(".log");
  if (log) {{ log.click(); await wait(() => page.querySelector(`#${{log.dataset.chart}}`).layout.yaxis.type === "log");
    seen.log = page.querySelector(`#${{log.dataset.chart}}`).layout.yaxis.type; }}
  seen.height = page.body.scrollHeight;
  const hidden = {{textContent: ".chart > * {{ display: none !important }}"}};
  page.head.append(Object.assign(page.createElement("style"), hidden));
  seen.undrawn = page.body.scrollHeight;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}};
frame.src = "{page}";
</script>"""

# Follows a link of a framed page, as a reader of a notebook would.
FRAME = """<script>
setInterval(() => {
  const page = document.querySelector("iframe").contentDocument, view = page.defaultView;
  const link = page.querySelector("nav a[href='#environment']");
  if (page.documentElement.dataset.drawn && !view.location.hash) link.click();
  document.body.dataset.seen = `${view.location.href}, scrolled: ${view.scrollY > 0}`;
}, 500);
</script>"""


def visit(page: Path, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Open a page; what the watcher saw, with everything written to the console."""
    watcher = page.with_name("watcher.html")
    watcher.write_text(WATCHER.format(page=page.name, width=width))
    command = [str(BROWSER), *SWITCHES, "--enable-logging=stderr", f"--window-size={max(width, 500)},1000"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *(["--blink-settings=preferredColorScheme=0"] * dark)]
    command.append(watcher.as_uri())
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="seen">(.+?)</pre>', run.stdout, re.DOTALL)
    assert found, f"the page was not drawn:\n{run.stderr[-3000:]}"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    seen["console"] = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return seen


def check_quiet(seen: dict[str, Any]) -> None:
    """Nothing went wrong, nothing was fetched, nothing moved."""
    assert seen["errors"] == []
    assert seen["console"] == []
    assert seen["resources"] == []
    assert seen["height"] == seen["undrawn"]  # drawing moves nothing
    assert seen["overflow"] is False
    assert seen["drawn"] == seen["charts"]


def test_a_run_is_drawn(trained: Path, tmp_path: Path) -> None:
    page = write_report(trained / "long-1", tmp_path / "report.html")
    seen = visit(page)

    check_quiet(seen)
    assert seen["heading"] == "long-1"
    assert seen["curves"] >= 2  # loss, accuracy
    assert seen["bars"] >= 10
    assert {"EMA", "batch_end", "LabelSmoothing", "before_loss", "checkpoint"} <= set(seen["ticks"])
    assert seen["before"] == ["batch"]
    assert set(seen["epoch"]) == {"epoch"}
    assert "seconds" in seen["time"]
    assert seen["log"] == "log"


def test_a_comparison_fits_a_phone(trained: Path, tmp_path: Path) -> None:
    page = write_report(trained, tmp_path / "report.html")
    seen = visit(page, width=390)

    check_quiet(seen)
    assert seen["heading"] == "longshort"
    assert seen["curves"] >= 4  # two groups in each of loss, accuracy


def test_a_confusion_matrix_is_drawn_in_the_dark(record: Any, tmp_path: Path) -> None:
    run = record("run")
    run.logger.log_metrics({"metrics/eval/Confusion": np.eye(3), "metrics/eval/PerClass": np.array([0.5, 1.0])})
    run.close()
    seen = visit(write_report(tmp_path / "run", tmp_path / "report.html"), dark=True)

    check_quiet(seen)
    assert 2 == seen["charts"]
    assert ["column", "index"] == sorted(seen["before"])


def test_two_confusion_matrices_stand_side_by_side_with_one_scale(record: Any, tmp_path: Path) -> None:
    for name, matrix in (("a", [[5, 1], [0, 6]]), ("b", [[90, 0], [2, 4]])):
        run = record(name, name=name)
        run.logger.log_metrics({"metrics/eval/Confusion": np.array(matrix), "metrics/eval/PerClass": [0.5, 0.1]})
        run.close()
    seen = visit(write_report(tmp_path, tmp_path / "report.html"))

    check_quiet(seen)
    (low, high, top), other = seen["matrices"]
    assert (low, high) == (0, 90)
    assert other == [low, high, top]


def test_the_frame_of_a_notebook_draws_and_stays_on_its_page(trained: Path, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<body>{Report(trained)._repr_html_()}{FRAME}")
    command = [str(BROWSER), *SWITCHES, f"--user-data-dir={tmp_path / 'profile'}", notebook.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert re.findall('data-seen="(.+?)"', run.stdout) == ["about:srcdoc#environment, scrolled: true"]


def test_many_charts_are_drawn_one_after_another(record: Any, tmp_path: Path) -> None:
    run = record("run")
    run.logger.log_metrics({f"metrics/eval/m{i}": 0.5 for i in range(200)})
    run.fit([0.5] * 3).close()
    seen = visit(write_report(tmp_path / "run", tmp_path / "report.html"))

    check_quiet(seen)
    assert seen["charts"] >= 60
    assert seen["at_once"] < seen["charts"]


def test_a_hostile_run_that_diverged_is_drawn_and_runs_nothing(record: Any, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)><svg/onload=alert(3)>"
    run = record("run", name=evil, group=evil)
    run.logger.log_hyperparameters({evil: evil})
    run.logger.log_traces({f"algorithm_traces/{evil.replace('/', '')}/Event.{evil}": 1})
    run.fit([1.0, math.nan, 0.5, math.inf, -0.25], name=f"loss/train/{evil}")
    run.evaluate(0.5, label=evil).close()
    seen = visit(write_report(tmp_path / "run", tmp_path / "report.html"))

    check_quiet(seen)
    assert seen["heading"] == evil
    assert seen["crosses"] >= 2
    assert evil.replace("/", "") in seen["ticks"]


def test_the_policy_of_the_page_blocks_injected_scripts_and_reports_them(trained: Path, tmp_path: Path) -> None:
    page = write_report(trained / "long-1", tmp_path / "report.html")
    slipped = '<img src="https://example.com/a.png" onerror="alert(1)"><script>alert(2)</script>'
    page.write_text(page.read_text().replace("<header", f"{slipped}<header", 1))
    seen = visit(page)

    assert seen["errors"] == []
    assert len([line for line in seen["console"] if "Content Security Policy" in line]) >= 3
