from __future__ import annotations

import inspect
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from recipe_runs import OPTIONS, QUIET, Commanded, task_of

from composer.recipes import Comparison
from composer.recipes.cli import RECIPES, main
from composer.testing import run_on_ranks
from composer.utils import dist

QUICK = [
    *("digits", *QUIET.split()),
    *"--epochs 1 --seeds 1 --train_samples 60 --test_samples 50 --batch_size 20 --width 8".split(),
]
Command = Callable[[str], Commanded]


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of a command that exits with status 0."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def numbers(path: Path) -> list[list[tuple[int, dict[str, list[float]], int]]]:
    """The results that must not depend on the clock."""
    recipes = json.loads(path.read_text())["recipes"]
    return [[(run["seed"], run["scores"], run["samples"]) for run in recipe["runs"]] for recipe in recipes]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_script_is_this_function() -> None:
    (script,) = entry_points(group="console_scripts", name="composer-train")

    assert main is script.load()


def test_the_help_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "--help")

    for name, summary in RECIPES.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_of_a_recipe_explains_every_option(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(recipe)
    parts = (task.data, task.network, task.training, task.runs)
    names = {field.name for part in parts for field in fields(part)} | {"config", "out", "algorithms"}
    for name, algorithm in task.algorithms.items():
        decided = {"image_key", "input_key", "target_key", *task.fitted(task.data).get(name, {})}
        keys = inspect.signature(algorithm).parameters.keys() - decided
        names |= {f"{name}.{key}" for key in keys}

    text = text_of(capsys, recipe, "--help")

    # An option, what it takes, and then at least two words; type and default do not count.
    options = re.split(r"\n  (?=-)", text.partition("\noptions:")[2])[1:]
    explained = {}
    for option in options:
        head, *words = re.sub(r"\((required, )?(type|default):[^()]*(\([^()]*\))?[^()]*\)", "", option).split()
        explained[head.rstrip(",").removeprefix("--").removeprefix("[no-]")] = len(words)
    assert set() == {name for name in names if f"--{name}" not in text and f"--no-{name}" not in text}
    assert [] == [name for name, words in explained.items() if words < 3 and name not in ("-h", "print_config")]
    assert "_key" not in text
    assert task.summary in " ".join(text.split())


def test_help_of_algorithms_comes_from_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The weight of the old average in an update" in text_of(capsys, "digits", "--help")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_printed_configuration_is_read_back(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = "--epochs 7 --ema.half_life 9ba --algorithms ema --no-progress --print_config".split()
    first = text_of(capsys, recipe, *options)
    (tmp_path / "recipe.yaml").write_text(first)

    second = text_of(capsys, recipe, "--config", "recipe.yaml", "--lr", "0.0125", "--print_config")

    before, after = yaml.safe_load(first), yaml.safe_load(second)
    assert (7, "9ba", False, ["ema"]) == (
        before["epochs"],
        before["ema"]["half_life"],
        before["progress"],
        before["algorithms"],
    )
    assert {**before, "lr": 0.0125} == after


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_defaults_are_those_of_the_task(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(recipe)
    text = text_of(capsys, recipe, "--print_config").splitlines()

    assert [f"- {name}" for name in task.chosen] == [line for line in text if line.startswith("-")]
    assert f"out: composer-{recipe}" in text
    for part in (task.data, task.network, task.training, task.runs):
        for key, value in vars(part).items():
            assert f"{key}: {_yaml(value)}" in text
    for name, arguments in task.tuned.items():
        section = text[text.index(f"{name}:") + 1 :]
        assert {f"  {key}: {_yaml(value)}" for key, value in arguments.items()} <= set(section)


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("digits", "--epochs abc", "Expected a <class 'float'>"),
        ("digits", "--device tpu", "'cpu', 'gpu', 'cuda', 'mps'"),
        ("digits", "--epochs 0", "`epochs` must be positive and finite, got 0"),
        ("digits", "--width 0", "`width` must be at least 1, got 0"),
        ("digits", "--algorithms mixup --mixup.alpha -2", "`--mixup`: `alpha` must not be negative"),
        ("digits", "--algorithms mixup --ema.half_life 3ba", "`--ema.half_life` has no effect, because `ema` is not"),
        ("digits", "--algorithms --mixup.alpha 3", "because `mixup` is not among `--algorithms`, which are none"),
        ("digits", "--algorithms mixup mixup", "`--algorithms` must name each algorithm once, got mixup mixup"),
        ("digits", "--algorithms foo", "'blurpool', "),
        ("digits", "--train_samples 9999", "`train_samples` must be at most 500"),
        ("digits", "--out a-file/inside", "Not a directory: 'a-file/inside'"),
        ("digits", "--config nowhere.yaml", "File does not exist"),
        ("digits", "--config a-file", "Problems parsing config"),
        ("digits", "--nonsense 3", "nrecognized arguments: --nonsense 3"),
        ("fashion_mnist", "", "`data` must name the folder that holds the dataset, got none"),
        ("fashion_mnist", "--data nowhere", "FashionMNIST('nowhere', download=True)"),
        ("imagenet_resnet50", "--data nowhere", "ImageNet was not found: looked for 'nowhere/train/<class>/*.JPEG'"),
        ("imagenet_resnet50", "--epochs 8", "`warmup_epochs` must be at least 0 and below `epochs`, got 8"),
        ("imagenet_resnet50", "--config warm", "File does not exist"),
        ("tiny_lm", "--data nowhere", "looked for 'nowhere/tinyshakespeare.txt' and 'nowhere/text"),
        ("tiny_lm", "--data a-file --batch_size 2", "The text must have a batch of 2 sequences of 256 characters"),
        ("gpt_record", "--without muon ema", "`--without` must name some of muon, got ema"),
        ("gpt_record", "--width 10 --heads 2", "`width` must be a multiple of 2 * `heads`, got 10 and 2"),
        ("segmentation", "--size 20", "`size` must be at least 28, got 20"),
    ],
)
def test_an_error_is_reported_in_one_line(
    recipe: str, arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("this: [is no: configuration")

    with pytest.raises(SystemExit) as exit_:
        main([recipe, *arguments.split()])

    assert exit_.value.code == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert error.startswith(f"composer-train {recipe}: error: ")
    assert error.endswith(f". See `composer-train {recipe} --help`.\n")
    assert message in error


@pytest.mark.parametrize("arguments", [[], ["mnist"]])
def test_a_recipe_must_be_chosen(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)

    assert exit_.value.code == 2
    assert "RECIPE" in capsys.readouterr().err


def test_an_interrupted_run_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Comparison) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "run", interrupted)

    with pytest.raises(SystemExit, match="composer-train: interrupted"):
        main([*QUICK, "--algorithms"])


@pytest.mark.parametrize("recipe", OPTIONS)
def test_every_recipe_trains_compares_and_stores(recipe: str, command: Command) -> None:
    task, ran = task_of(recipe), command(recipe)
    stored = ran.results

    assert ["plain", "composed"] == [each["name"] for each in stored["recipes"]]
    for each in stored["recipes"]:
        for run in each["runs"]:
            count = len(run["tested_at"])
            assert {metric.key: count for metric in task.metrics} == {
                key: len(run["scores"][key]) for key in run["scores"]
            }
            assert sorted(run["tested_at"]) == run["tested_at"]
            assert 0 < run["tested_at"][0] <= run["tested_at"][-1] <= run["train_seconds"] < run["seconds"]
    composed = ran.composed
    chosen = [kind.__name__ for kind in task.algorithms.values() if kind.__name__ in composed["runs"][0]["actions"]]
    assert len(chosen) == len(composed["algorithms"]) == len(composed["runs"][0]["actions"])
    assert "did nothing" not in composed["runs"][0]["actions"].values()
    time_to_quality = stored["time_to_quality"]["composed"]
    assert ran.plain["summary"][task.metrics[0].key]["mean"] == time_to_quality["goal"]
    assert len(composed["runs"]) == len(time_to_quality["ratios"])
    for name in ("results.json", "config.yaml", "report.html"):
        assert f"{ran.folder}/{name}" in ran.text
        assert (ran.folder / name).stat().st_size > 0


@pytest.mark.parametrize("recipe", OPTIONS)
def test_every_recipe_prints_table_verdict_and_actions(recipe: str, command: Command) -> None:
    task, ran = task_of(recipe), command(recipe)
    metric = task.metrics[0]
    plain, composed = (each["summary"][metric.key]["mean"] for each in ran.results["recipes"])
    ratio = ran.composed["summary"]["train_seconds"] / ran.plain["summary"]["train_seconds"]

    for each in ran.results["recipes"]:
        row = next(line for line in ran.text.splitlines() if re.search(rf"\W{each['name']}\W", line))
        for column in task.metrics:
            assert column.show(each["summary"][column.key]["mean"]).removesuffix(column.unit) in row
    verdict = (
        f"plain -> composed: test {metric.title} {metric.show(plain)} -> {metric.show(composed)}, in {ratio:.2f} times"
    )
    assert verdict in ran.text
    assert f"the {metric.show(plain)} that plain has at its end" in ran.text
    for action in ran.composed["runs"][0]["actions"].values():
        assert action in ran.text


@pytest.mark.parametrize(
    ("recipe", "plain", "composed"),
    [
        ("digits", [240, 3], [240, 3]),
        ("fashion_mnist", [48, 3], [24, 2]),  # tested after 5, 10 and 12 batches, and after 5 and 6
        ("cifar10_record", [16, 2], [16, 2]),
        ("imagenet_resnet50", [12, 1], [12, 1]),
        ("tiny_lm", [44, 1], [24, 1]),  # 45 sequences, of which a batch of 4 is not filled: 11 batches, and 6 of them
        ("gpt_record", [88, 2], [88, 2]),
        ("segmentation", [24, 2], [16, 2]),
    ],
)
def test_runs_have_the_requested_length_and_evaluations(
    recipe: str, plain: list[int], composed: list[int], command: Command
) -> None:
    lengths = [
        [[run["samples"], len(run["tested_at"])] for run in each["runs"]] for each in command(recipe).results["recipes"]
    ]

    seeds = 2 if recipe == "digits" else 1
    assert [[plain] * seeds, [composed] * seeds] == lengths


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (
            "digits",
            "the handwritten digits of scikit-learn: 80 images to train on, 20 to test, 1x16x16 pixels, 10 classes",
        ),
        ("fashion_mnist", "Fashion-MNIST: 24 images to train on, 10 to test, 1x28x28 pixels, 10 classes"),
        ("cifar10_record", "CIFAR-10: 8 images to train on, 4 to test, 3x32x32 pixels, 10 classes"),
        ("imagenet_resnet50", "data0: 12 images to train on, 4 to test, 2 classes, 32 pixels to train, 32 to test"),
        ("tiny_lm", "tinyshakespeare.txt: 45 sequences to train on, 5 to test, of 16 characters, "),
        ("gpt_record", "tinyshakespeare.txt: 45 sequences to train on, 5 to test, of 16 characters, "),
        ("segmentation", "scenes of Fashion-MNIST: 12 images to train on, 4 to test, 1x32x32 pixels, 11 classes"),
    ],
)
def test_the_data_are_described_first(recipe: str, line: str, command: Command) -> None:
    assert command(recipe).text.startswith(line)


@pytest.mark.parametrize(("recipe", "weights"), [("cifar10_resnet9", 4_000_000), ("cifar10_resnet20", 250_000)])
def test_the_recipes_for_cifar_have_the_network_in_their_name(recipe: str, weights: int) -> None:
    network = task_of(recipe).network.build(SimpleNamespace(num_classes=10))

    assert sum(parameter.numel() for parameter in network.parameters()) > weights


def test_without_algorithms_only_the_plain_recipe_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*QUICK, "--algorithms"])

    stored = json.loads((tmp_path / "composer-digits/results.json").read_text())
    assert ["plain"] == [recipe["name"] for recipe in stored["recipes"]]
    assert {} == stored["time_to_quality"]
    assert "->" not in capsys.readouterr().out


def test_the_stored_configuration_repeats_the_run_bit_for_bit(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = command("digits")
    arguments = ["digits", "--config", str(first.folder / "config.yaml"), "--out", str(tmp_path / "again")]
    monkeypatch.setattr(sys, "argv", ["composer-train", *arguments])

    with redirect_stdout(io.StringIO()) as text:
        runpy.run_module("composer.recipes", run_name="__main__")

    assert numbers(first.folder / "results.json") == numbers(tmp_path / "again/results.json")
    rows = [re.findall(r"\d+\.\d\d \+- \d+\.\d\d%", each) for each in (first.text, text.getvalue())]
    assert 2 == len(rows[0])
    assert rows[0] == rows[1]


def _on_a_rank(folder: str) -> list[str]:
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as text:
        main([*QUICK, "--out", f"out{dist.get_global_rank()}", "--algorithms", "ema", "mixup"])
    return text.getvalue().splitlines()


def test_several_processes_train_together_and_one_reports(tmp_path: Path) -> None:
    first, second = run_on_ranks(_on_a_rank, 2, str(tmp_path))

    assert any("composed" in line for line in first)
    assert [] == second
    assert (tmp_path / "out0" / "results.json").exists()
    assert not (tmp_path / "out1" / "results.json").exists()
    plain, composed = numbers(tmp_path / "out0" / "results.json")
    assert [60, 60] == [plain[0][2], composed[0][2]]  # samples of both processes together


def test_a_command_that_is_given_again_goes_on(tmp_path: Path) -> None:
    arguments = [*QUICK, "--save_folder", f"file://{tmp_path}/saved"]
    main(arguments)
    first = json.loads(Path("composer-digits/results.json").read_text())
    main(arguments)

    assert (
        first["recipes"][0]["runs"][0]["tested_at"]
        == json.loads(Path("composer-digits/results.json").read_text())["recipes"][0]["runs"][0]["tested_at"]
    )
