from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer.recipes import Data, Network, Runs, Training, digits
from composer.recipes.cli import _write_page, main
from composer.testing import run_on_ranks
from composer.utils import dist

QUICK = (
    "digits --no-progress --device cpu --epochs 2 --seeds 2 --train_samples 60 --test_samples 50 --batch_size 20 "
    "--width 4 --algorithms mixup ema"
).split()


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints before it exits with status 0."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def accuracies(path: Path) -> list[list[list[float]]]:
    return [[run["accuracy"] for run in recipe["runs"]] for recipe in json.loads(path.read_text())["recipes"]]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_script_is_this_function() -> None:
    (script,) = entry_points(group="console_scripts", name="composer-train")

    assert script.load() is main


def test_the_help_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "digits" in text_of(capsys, "--help")


def test_the_help_of_a_recipe_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "digits", "--help")
    names = {field.name for group in (Data, Network, Training, Runs) for field in fields(group)}
    names |= {"config", "out", "algorithms", "no-progress", "mixup.alpha", "ema.half_life", "sam.rho"}
    names |= {"blurpool.blur_first", "label_smoothing.smoothing", "progressive_resizing.initial_scale"}

    assert {name for name in names if f"--{name}" not in text} == set()
    options = re.split(r"\n  (?=-)", text.partition("\noptions:")[2])[1:]
    assert [option.split()[0] for option in options if len(option.split()) < 4] == []
    assert "The weight that the average keeps in one update" in text
    assert "_key" not in text


def test_the_printed_configuration_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = text_of(capsys, "digits", "--epochs", "7", "--mixup.alpha", "0.75", "--no-progress", "--print_config")
    (tmp_path / "recipe.yaml").write_text(first)

    second = text_of(capsys, "digits", "--config", "recipe.yaml", "--lr", "0.01", "--print_config")

    assert {"epochs: 7", "  alpha: 0.75", "progress: false"} <= set(first.splitlines())
    changed = set(second.splitlines()) - set(first.splitlines())
    assert changed == {"lr: 0.01"}


def test_the_defaults_are_the_recipes_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "digits", "--print_config")

    assert [f"- {name}" for name in digits.COMPOSED] == [line for line in text.splitlines() if line.startswith("-")]
    for line in (f"epochs: {Training().epochs}", f"lr: {Training().lr}", f"batch_size: {Data().batch_size}"):
        assert line in text.splitlines()
    for arguments in digits.TUNED.values():
        assert all(f"  {key}: {value}" in text.splitlines() for key, value in arguments.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--epochs abc", "`--epochs`: Expected a int. Got value: abc"),
        ("--epochs 0", "`epochs` must be at least 1, got 0"),
        ("--lr -1", "`lr` must be positive and finite, got -1.0"),
        ("--mixup.alpha -2", "`--mixup`: `alpha` must not be negative"),
        ("--algorithms mixup --ema.half_life 3ba", "`--ema.half_life` has no effect, because `ema` is not among"),
        ("--algorithms --mixup.alpha 3", "because `mixup` is not among `--algorithms`, which are none"),
        ("--algorithms mixup mixup", "`--algorithms` must name each algorithm once, got mixup mixup"),
        ("--algorithms foo", "`--algorithms` element 1: Expected a Literal['blurpool', "),
        ("--precision fp64", "`--precision`"),
        ("--data nowhere", "there is neither 'nowhere/FashionMNIST/raw' nor 'nowhere/cifar-10-batches-py'"),
        ("--train_samples 9999", "`train_samples` must be at most 500"),
        ("--shift 16", "`shift` must be from 0 to below the size of the images, 16, got 16"),
        ("--out a-file/inside", "Not a directory: 'a-file/inside'"),
        ("--config nowhere.yaml", "File does not exist"),
        ("--config a-file", "Problems parsing config"),
        ("--nonsense 3", "nrecognized arguments: --nonsense 3"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("this: [is no: configuration")

    with pytest.raises(SystemExit) as exit_:
        main(["digits", *arguments.split()])

    assert exit_.value.code == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert error.startswith("composer-train digits: error: ")
    assert error.endswith(". See `composer-train digits --help`.\n")
    assert message in error


def test_a_recipe_must_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])

    assert exit_.value.code == 2
    assert "digits" in capsys.readouterr().err


def test_a_comparison_is_printed_drawn_and_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([*QUICK, "--out", "first"])
    text = capsys.readouterr().out

    assert "60 images to train on, 50 to test" in text
    assert re.search(r"plain\W+\d+\.\d\d \+- \d+\.\d\d%", text)
    assert re.search(r"composed\W+\d+\.\d\d \+- \d+\.\d\d%", text)
    assert "mixed the images of 6 batches in pairs" in text
    assert "before_forward" in text
    for name in ("curves.png", "results.json", "config.yaml"):
        assert f"first/{name}" in text
        assert (tmp_path / "first" / name).stat().st_size > 0


def test_a_page_about_the_runs_is_written_or_said_how_to_get(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.recipes.cli.find_spec", lambda name: None)
    main([*QUICK, "--out", "out"])

    assert "pip install composer-report, composer-report out/runs" in capsys.readouterr().out
    assert len(list((tmp_path / "out/runs").glob("*/run-rank0.jsonl"))) == 4

    written = SimpleNamespace(write_report=lambda folders, page: f"{page} about {len(folders)} runs")
    monkeypatch.setattr("composer.recipes.cli.find_spec", lambda name: object())
    monkeypatch.setattr("composer.recipes.cli.import_module", lambda name: written)

    told = _write_page(SimpleNamespace(folders=[tmp_path] * 4), Path("out"))  # type: ignore[arg-type]
    assert told == "A page about all runs, to open in a browser: out/report.html about 4 runs"


def test_the_stored_configuration_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    main([*QUICK, "--out", "first", "--seed", "3"])
    main(["digits", "--config", "first/config.yaml", "--out", "second"])

    assert accuracies(tmp_path / "first/results.json") == accuracies(tmp_path / "second/results.json")


def test_without_algorithms_only_the_plain_recipe_is_trained(tmp_path: Path) -> None:
    main([*QUICK, "--algorithms"])

    names = [
        recipe["name"] for recipe in json.loads((tmp_path / "composer-digits/results.json").read_text())["recipes"]
    ]
    assert names == ["plain"]


def test_a_profile_is_written_and_the_user_is_told_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first/profile").mkdir(parents=True)
    (tmp_path / "first/profile/merged_trace.json").write_text("of an earlier comparison")
    main([*QUICK, "--profile", "--out", "first", "--batch_size", "10", "--seeds", "1", "--epochs", "1"])
    text = capsys.readouterr().out

    path = "first/profile/merged_trace.json"
    assert f"Profile of 4 batches after 2 to warm up, and the evaluation: {path}\n" in text
    assert "https://ui.perfetto.dev" in text
    begun = [event["name"] for event in json.loads((tmp_path / path).read_text()) if event["ph"] == "B"]
    assert [begun.count(f"event/{name}") for name in ("fit", "epoch", "batch", "eval")] == [1, 1, 6, 1]
    assert begun.count("algorithm/MixUp/event/before_forward") == 6
    assert "--profile" not in (tmp_path / "first/config.yaml").read_text()


@pytest.mark.parametrize(("layout", "name"), [("fashion", "Fashion-MNIST"), ("cifar", "CIFAR-10")])
def test_other_data_decide_the_shape_of_the_network(
    layout: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(layout)

    main(
        f"digits --no-progress --device cpu --data {folder} --epochs 1 --seeds 1 --batch_size 15 --width 16 "
        "--test_samples 10 --algorithms blurpool progressive_resizing".split()
    )

    stored = json.loads((tmp_path / "composer-digits/results.json").read_text())
    assert (stored["data"]["name"], stored["data"]["train_images"]) == (name, 30)


def test_the_module_runs_too_and_two_processes_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "composer.recipes", *QUICK]
    environment = {**os.environ, "COLUMNS": "100"}
    runs = [
        subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True, check=True).stdout
        for out in ("first", "second")
    ]

    rows = [[re.findall(r"\d+\.\d\d \+- \d+\.\d\d%", line) for line in run.splitlines()] for run in runs]
    assert rows[0] == rows[1]
    assert len([row for row in rows[0] if row]) == 2
    assert accuracies(tmp_path / "first/results.json") == accuracies(tmp_path / "second/results.json")


def _on_a_rank(folder: str) -> list[str]:
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as text:
        main([*QUICK, "--out", f"out{dist.get_global_rank()}"])
    return text.getvalue().splitlines()


def test_several_processes_train_together_and_one_reports(tmp_path: Path) -> None:
    first, second = run_on_ranks(_on_a_rank, 2, str(tmp_path))

    assert any("composed" in line for line in first)
    assert second == []
    assert (tmp_path / "out0" / "results.json").exists()
    assert not (tmp_path / "out1" / "results.json").exists()
    plain, composed = accuracies(tmp_path / "out0" / "results.json")
    assert len(plain) == len(composed) == 2  # seeds
