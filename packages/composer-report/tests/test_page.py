"""The page as text; what a browser makes of it is in test_browser.py."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import runpy
import sys
from html.parser import HTMLParser
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer.report import Checkpoint, Run, Series, read_run, write_report
from composer.report._page import render
from composer.report.cli import main

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;"


class Page(HTMLParser):
    """Collects the elements, attributes and scripts that a browser would find."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._in_script = self._in_style = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._in_script, self._in_style = tag == "script", tag == "style"
        if self._in_script:
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._in_script:
            attributes, content = self.scripts[-1]
            self.scripts[-1] = attributes, content + data
        elif not self._in_style:
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_style = False


def page_of(folders: Any, tmp_path: Path) -> str:
    return write_report(folders, tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def sections(content: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', content)


def test_the_page_of_a_run_has_all_its_parts(trained: Path, tmp_path: Path) -> None:
    content = page_of(trained / "long-1", tmp_path)

    assert sections(content) == [
        "results", "curves", "algorithms", "checkpoints", "hyperparameters", "environment",
    ]  # fmt: skip
    wanted = "long-1|finished|24 batches, 3 epochs|SimpleModel|ckpt/ep3-ba24-rank0.pt|rank_zero_seed"
    assert [text for text in wanted.split("|") if text not in content] == []
    assert "24 at before_loss" in content
    assert "<td>LabelSmoothing</td>" in content  # in the plan


def test_the_page_of_several_runs_compares_groups(trained: Path, tmp_path: Path) -> None:
    content = page_of(trained, tmp_path)

    assert sections(content)[:5] == ["results", "curves", "runs", "algorithms", "hyperparameters"]
    assert "Comparison of 4 runs in 2 groups" in content
    assert "mean and standard deviation over 2 runs" in content
    rows = re.findall(r"<tr><td><code>metrics/<wbr>eval/<wbr>MulticlassAccuracy</code></td>(.*?)</tr>", content)
    assert len(re.findall(r"\d \u00b1 \d", rows[0])) == 2


def test_nothing_is_loaded_and_only_our_scripts_may_run(trained: Path, tmp_path: Path) -> None:
    content = page_of([trained / "long-1", trained / "short-1"], tmp_path)
    page = Page(content)

    assert {"link", "iframe", "object", "embed", "base", "form", "img"} & page.tags.keys() == set()
    loaded = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert {value[0] for _, _, value in loaded if value} == {"#"}
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and value and "default-src" in value]
    assert "default-src 'none'" in policy
    code = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert re.findall(r"sha256-([^']+)'", policy) == hashes
    assert "unsafe-inline'; img" in policy  # of styles alone
    assert "unsafe" not in policy.partition("script-src")[2]
    style = content.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style
    assert "url(" not in style


def test_a_hostile_run_is_harmless(record: Any, tmp_path: Path) -> None:
    plain = record("plain", name="plain")
    plain.fit([1.0, 0.5]).close()
    run = record("evil", name=EVIL, group=EVIL)
    run.logger.log_hyperparameters({EVIL: EVIL, "nested": {EVIL: [EVIL]}})
    run.logger.log_traces({f"algorithm_traces/{EVIL.replace('/', '')}/Event.{EVIL}": 1})
    run.logger.log_table([EVIL, "b"], [[EVIL, 1]], name=EVIL)
    run.logger.log_table(["algorithm", "description"], [[EVIL.replace("/", ""), EVIL]], name="algorithms")
    run.logger.log_metrics({"text": EVIL})
    run.fit([1.0, 0.5], name=EVIL).evaluate(0.5, label=EVIL)
    try:
        raise ValueError(EVIL)
    except ValueError:
        run.close()
    harmless = Page(page_of(tmp_path / "plain", tmp_path))

    for folders in (tmp_path / "evil", [tmp_path / "plain", tmp_path / "evil"]):
        page = Page(page_of(folders, tmp_path))
        assert page.tags["script"] == harmless.tags["script"]
        assert "img" not in page.tags
        assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
        assert EVIL in "".join(page.text)
        json.loads(page.scripts[0][1])


def test_arrays_are_drawn(record: Any, tmp_path: Path) -> None:
    run = record()
    run.logger.log_metrics({"metrics/eval/Confusion": np.array([[3, 0], [1, 2]]), "metrics/eval/PerClass": [0.5]})
    run.logger.log_metrics({"metrics/eval/PerClass": np.array([0.5, math.nan]), "video": np.zeros((2, 3, 4))})
    run.logger.log_metrics({f"big/{i}": np.zeros(1 << 20) for i in range(2)})
    run.close()
    content = page_of(tmp_path / "run", tmp_path)

    drawn = json.loads(Page(content).scripts[0][1])["charts"]
    arrays = [chart["values"] for chart in drawn if chart["kind"] == "array"]
    assert ["2, 2", None, "2, 12"] == [values.get("shape") for values in arrays[:3]]
    np.testing.assert_array_equal([3, 0, 1, 2], np.frombuffer(base64.b64decode(arrays[0]["bdata"]), "<f4"))
    np.testing.assert_array_equal([0.5, np.nan], np.frombuffer(base64.b64decode(arrays[1]["bdata"]), "<f4"))
    assert "1 metric more not drawn: big/1" in content


def test_arrays_of_compared_runs_stand_side_by_side_in_the_colors_of_the_runs(record: Any, tmp_path: Path) -> None:
    for name, matrix in (("a", [[3, 0], [1, 2]]), ("b", [[9, 0], [math.nan, 2]])):
        run = record(name, name=name)
        run.logger.log_metrics({"metrics/eval/Confusion": np.array(matrix), f"only_{name}": np.ones(3)})
        run.close()
    content = page_of([tmp_path / "a", tmp_path / "b"], tmp_path)

    drawn = json.loads(Page(content).scripts[0][1])["charts"]
    arrays = [(chart["slot"], chart["range"]) for chart in drawn if chart["kind"] == "array"]
    assert arrays == [(0, [0, 9]), (1, [0, 9]), (0, [1, 1]), (1, [1, 1])]
    row = content.partition('<section id="arrays">')[2].partition('<div class="grid">')[2].partition('class="grid"')[0]
    assert re.findall(r'class="title">(.+?)</span><code>(.+?)</code>', row) == [
        ("eval/Confusion", "a"),
        ("eval/Confusion", "b"),
    ]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_last_images_of_a_name_are_shown(record: Any, tmp_path: Path, channels_last: bool) -> None:
    from PIL import Image

    first, last = torch.rand(3, 4, 5), torch.rand(2, 3, 4, 5)
    masks = torch.eye(4, 5, dtype=torch.bool)
    run = record()
    for images in ([first], last):
        shown = [each.movedim(-3, -1) for each in images] if channels_last else images
        run.logger.log_images(shown, name="wrong / guesses", channels_last=channels_last)
    run.logger.log_images([masks] * 70, name="masks")
    for name in ("wrong - guesses", "long " * 100):
        run.logger.log_images(masks, name=name)
    run.close()

    guesses, many, *others = read_run(tmp_path / "run").images
    assert len({each.files for each in (guesses, *others)}) == 3
    assert (guesses.name, guesses.num_images, many.num_images, len(many.files)) == ("wrong / guesses", 2, 70, 64)
    for file, image in zip(guesses.files, last, strict=True):
        assert np.array_equal(np.asarray(Image.open(file)), (image.movedim(0, -1) * 255).round().byte().numpy())
    assert np.array_equal(np.asarray(Image.open(many.files[0])) > 0, masks.numpy())
    page = write_report(tmp_path / "run", tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 68
    assert "masks (batch 0, the first 64 of 70)" in page


def test_a_record_cannot_show_a_file_from_elsewhere(record: Any, tmp_path: Path) -> None:
    run = record()
    run.close()
    (tmp_path / "secret.png").write_bytes(b"secret")
    with run.recorder.path.open("a") as file:
        named = {"name": "x", "step": 0, "files": ["../secret.png", str(tmp_path / "secret.png")], "num_images": 2}
        file.write(json.dumps({"type": "images", "seconds": 0.0, **named}) + "\n")

    assert read_run(tmp_path / "run").images[0].files == ()


def test_two_orders_of_algorithms_are_told_apart(run_trainer: Any, tmp_path: Path) -> None:
    from composer.algorithms.ema import EMA
    from composer.algorithms.label_smoothing import LabelSmoothing

    for name, algorithms in (("a", [LabelSmoothing()]), ("b", [LabelSmoothing(), EMA(half_life="2ba")])):
        run_trainer(tmp_path / name, "1ep", algorithms=algorithms)
    page = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html").read_text()

    table = page.partition("Order of the algorithms at each event")[2].partition("</table>")[0]
    assert "EMA" in table
    assert "not set" in table
    assert "LabelSmoothing, EMA" in table
    assert "before_loss" not in table  # LabelSmoothing is alone there in both


def test_values_that_are_no_numbers_are_flagged(record: Any, tmp_path: Path) -> None:
    run = record()
    run.fit([1.0, math.nan, 0.5, math.inf, 0.25]).evaluate(math.nan).close()
    content = page_of(tmp_path / "run", tmp_path)

    assert "2 of 5 values are NaN or infinite, the first at batch 1." in content
    assert '<strong class="bad">NaN</strong>' in content
    data = json.loads(Page(content).scripts[0][1])
    (line,) = data["charts"][0]["lines"]
    values = np.frombuffer(base64.b64decode(line["y"]["bdata"]), "<f4")
    np.testing.assert_array_equal(values, np.array([1, np.nan, 0.5, np.nan, 0.25], dtype="<f4"))
    assert line["num_bad"] == 2


def test_a_long_run_with_many_metrics_makes_a_small_page() -> None:
    steps = np.arange(100_000)
    values = np.random.default_rng(0).normal(size=len(steps))
    names = ["loss/train/total", *(f"l2_norm/grad/layer{i}" for i in range(100))]
    metrics = {name: Series(name, steps, steps / 1000, steps // 1000, values) for name in names}
    content = render([Run(Path("long"), "long", batches=len(steps), seconds=1e3, metrics=metrics)])

    assert len(content) < 9e6
    assert "hours" not in content.partition("<nav>")[2].partition("</nav>")[0]
    assert ">minutes<" in content


@pytest.mark.parametrize("num_runs", [1, 2])
@pytest.mark.parametrize("name", ["metrics/eval/m{}", "metrics/m{}/Accuracy", "throughput/m{}", "m{}", "a/m{}"])
def test_a_section_has_at_most_60_charts_of_500_lines(num_runs: int, name: str) -> None:
    """Thousands of them take a browser minutes. Those that are not drawn are named."""
    steps = np.arange(3)
    names = [name.format(i) for i in range(700)]
    metrics = {each: Series(each, steps, steps * 1.0, steps, steps + i) for i, each in enumerate(names)}
    content = render([Run(Path(f"{i}"), f"run {i}", metrics=metrics) for i in range(num_runs)])
    [data] = [text for attributes, text in Page(content).scripts if attributes.get("id") == "data"]
    charts = json.loads(data)["charts"]

    assert len(charts) <= 60
    assert max(len(chart["lines"]) for chart in charts) <= 500
    drawn = sum(len(chart["lines"]) for chart in charts) // num_runs
    left = [int(found.replace(",", "")) for found in re.findall(r"([0-9,]+) metrics more not drawn: ", content)]
    assert drawn + sum(left) == len(names)


def test_a_checkpoint_shows_some_of_many_results() -> None:
    steps = np.arange(1, 4)
    names = [f"metrics/eval/m{i}" for i in range(1000)]
    metrics = {each: Series(each, steps, steps * 1.0, steps, steps / 8) for each in names}
    checkpoint = Checkpoint(None, "ep1.pt", "s3://bucket", 1, 2, None, "remote")
    content = render([Run(Path("a"), "a", metrics=metrics, checkpoints=[checkpoint])])

    assert "eval/m0 0.25, eval/m1 0.25, " in content
    assert "eval/m19 0.25, and 980 more<" in content


def test_a_run_without_anything_still_has_a_page(record: Any, tmp_path: Path) -> None:
    record().close()
    content = page_of(tmp_path / "run", tmp_path)

    assert ">unused<" in content
    assert sections(content) == ["environment"]


def test_checkpoints_that_are_gone_are_flagged(run_trainer: Any, tmp_path: Path) -> None:
    folder = run_trainer(tmp_path / "run", "1ep", save_folder=str(tmp_path / "run/ckpt"))
    (folder / "ckpt/ep1-ba8-rank0.pt").unlink()

    assert '<span class="bad">missing on disk</span>' in page_of(folder, tmp_path)


def test_hyperparameters_that_differ_come_first(record: Any, tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        run = record(name, name=name)
        run.logger.log_hyperparameters({"optimizer": {"lr": rate, "momentum": 0.9}, "same": 1, f"only_{name}": 2})
        run.close()
    content = page_of(tmp_path, tmp_path).partition('id="hyperparameters"')[2].partition("</section>")[0]
    first, _, rest = content.partition("<details>")

    assert re.findall(r"<td><code>([\w.]+)</code>", first) == ["only_a", "only_b", "optimizer.lr"]
    assert re.findall(r"<td><code>([\w.]+)</code>", rest) == ["optimizer.momentum", "same"]
    assert "2 hyperparameters the same in all runs" in rest
    assert first.count("not set") == 2


def test_a_resumed_run_lists_its_resumption(run_trainer: Any, tmp_path: Path) -> None:
    options = {"save_folder": str(tmp_path / "run/ckpt"), "autoresume": True, "run_name": "again"}
    for duration in ("1ep", "2ep"):
        run_trainer(tmp_path / "run", duration, **options)

    assert "Resumed at batch 8 (epoch 1)" in page_of(tmp_path / "run", tmp_path)


def test_at_least_one_folder_is_needed() -> None:
    with pytest.raises(ValueError, match="`folders` must have at least one folder of a run, got none"):
        write_report([])


# ---- the command ----


def test_the_script_is_this_function() -> None:
    (script,) = entry_points(group="console_scripts", name="composer-report")

    assert script.load() is main


def test_the_command_writes_the_page_and_prints_its_path(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main([str(trained)])
    main([str(trained / "long-1"), str(trained / "short-1"), "-o", "deep/er/page.html"])

    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"report\.html \(\d\.\d+ MB\): 4 runs", first)
    assert re.fullmatch(r"deep/er/page\.html \(\d\.\d+ MB\): 2 runs", second)
    assert (tmp_path / "deep/er/page.html").stat().st_size < 6e6


def test_the_page_of_a_running_run_is_written_until_it_ends(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output, seen = record().fit([3.0, 2.0]), tmp_path / "report.html", list[str]()
    run.recorder._sender.flush()

    def sleep(seconds: int) -> None:
        assert seconds == 7
        seen.append(output.read_text())
        if len(seen) == 2:
            run.end().close()

    monkeypatch.setattr("composer.report.cli.time.sleep", sleep)
    reads: list[Any] = []
    for module in ("cli", "_page"):
        monkeypatch.setattr(f"composer.report.{module}.read_run", lambda run: reads.append(run) or read_run(run))
    main([str(tmp_path / "run"), "-o", str(output), "--watch", "7"])

    assert all('http-equiv="refresh" content="7"' in page for page in seen)
    assert len(seen) == 2
    assert len(reads) == 3
    assert "refresh" not in output.read_text().partition("</title>")[0]


def test_ctrl_c_leaves_a_page_that_no_browser_loads_again(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = record().fit([3.0, 2.0]), tmp_path / "report.html"
    run.recorder._sender.flush()

    def interrupted(seconds: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("composer.report.cli.time.sleep", interrupted)
    main([str(tmp_path / "run"), "-o", str(output), "--watch", "7"])

    assert "refresh" not in output.read_text().partition("</title>")[0]
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("is written every 7 s until all runs have ended, or Ctrl-C.")
    assert last.endswith(": 1 run")


def test_a_mistake_is_answered_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path)])
    error = capsys.readouterr().err

    assert exit_.value.code == 2
    assert error.startswith("composer-report: error: ")
    assert "RunRecorder" in error
    assert error.count("\n") == 1


def test_the_module_runs_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["composer-report", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("composer.report", run_name="__main__")

    assert "RUN_FOLDER" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_has_a_page_of_its_values(run_trainer: Any, tmp_path: Path) -> None:
    folder = run_trainer(tmp_path / "run", device="gpu", precision="fp32")
    page = Page(page_of(folder, tmp_path))

    assert torch.cuda.get_device_name() in " ".join(page.text)
