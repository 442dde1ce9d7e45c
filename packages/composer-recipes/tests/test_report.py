from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from recipe_runs import task_of
from rich.console import Console

from composer.algorithms.mixup import MixUp
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.recipes import SGD, Recipe, Result, Run, cli, digits, fashion_mnist, time_to_quality
from composer.recipes._images import CLASSIFICATION, ImageSet
from composer.recipes._results import as_json, print_report

METRIC, LOSS = CLASSIFICATION


def made_up(name: str, accuracies: list[list[float]], seconds: float, algorithms: tuple[Any, ...] = ()) -> Result:
    """One run for each curve, tested at even steps of its time, `seconds` and one more for each seed."""
    runs = [
        Run(
            seed,
            {METRIC.key: accuracy, LOSS.key: [1 - a for a in accuracy]},
            [(seconds + seed) * (i + 1) / len(accuracy) for i in range(len(accuracy))],
            seconds + seed,
            seconds + seed + 1,
            100,
            {"MixUp": "did things"},
        )
        for seed, accuracy in enumerate(accuracies)
    ]
    data, training = fashion_mnist.Data(data=Path("images")), SGD(epochs=len(accuracies[0]))
    recipe = Recipe(name, data, digits.Network(), training, CLASSIFICATION, algorithms)
    return Result(recipe, runs, "the plan", "cpu", 3, 1234)


PLAIN = made_up("plain", [[0.2, 0.5, 0.90], [0.1, 0.6, 0.92]], 2.0)
COMPOSED = made_up("composed", [[0.3, 0.92, 0.94], [0.2, 0.8, 0.97]], 1.0, (MixUp(alpha=0.3),))


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return digits.Data(train_samples=60, test_samples=50).load()


def printed(results: list[Result]) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_report(results, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_numbers_of_the_table_can_be_computed_from_the_json(images: ImageSet) -> None:
    stored = json.loads(json.dumps(as_json([PLAIN, COMPOSED], images)))
    text = printed([PLAIN, COMPOSED])

    for recipe in stored["recipes"]:
        accuracy = [run["scores"]["MulticlassAccuracy"][-1] for run in recipe["runs"]]
        loss = [run["scores"]["CrossEntropy"][-1] for run in recipe["runs"]]
        seconds = [run["train_seconds"] for run in recipe["runs"]]
        speed = sum(run["samples"] for run in recipe["runs"]) / sum(seconds)
        expected = [recipe["name"], f"{100 * fmean(accuracy):.2f} +- {100 * stdev(accuracy):.2f}%"]
        expected += [f"{fmean(loss):.4f} +- {stdev(loss):.4f}", f"{fmean(seconds):.1f}", f"{speed:,.0f}"]
        row = next(line for line in text.splitlines() if recipe["name"] in line)
        assert expected == [cell.strip() for cell in re.split(r"[^\w\s.,%+-]+", row) if cell.strip()]
        summary = recipe["summary"]
        assert {"mean": fmean(accuracy), "spread": stdev(accuracy)} == summary["MulticlassAccuracy"]
        assert {"mean": fmean(loss), "spread": stdev(loss)} == summary["CrossEntropy"]
        assert (fmean(seconds), speed) == (summary["train_seconds"], summary["samples_per_second"])


def test_the_json_describes_data_and_recipes(images: ImageSet) -> None:
    stored = as_json([PLAIN, COMPOSED], images)

    assert images.describe() == stored["data"]
    assert str(torch.__version__) == stored["machine"]["torch"]
    assert 3 == stored["machine"]["threads"]
    composed = stored["recipes"][1]
    assert ["MixUp(alpha=0.3,interpolate_loss=False,input_key=0,target_key=1)"] == composed["algorithms"]
    assert ("images", 3) == (composed["hyperparameters"]["data"], composed["hyperparameters"]["epochs"])
    assert (["the plan"], 1234) == (composed["plan"], composed["num_parameters"])
    assert [1 / 3, 2 / 3, 1.0] == composed["runs"][0]["tested_at"]


def test_the_json_has_the_time_to_quality_of_each_recipe(images: ImageSet) -> None:
    never = made_up("never", [[0.5, 0.5], [0.5, 0.6]], 1.0)
    stored = json.loads(json.dumps(as_json([PLAIN, COMPOSED, never], images)))["time_to_quality"]
    found = time_to_quality(PLAIN, COMPOSED)

    assert {"composed", "never"} == set(stored)
    assert {
        "goal": found.goal,
        "mean": found.mean,
        "spread": found.spread,
        "ratios": found.ratios,
    } == stored["composed"]
    assert (None, [None, None]) == (stored["never"]["mean"], stored["never"]["ratios"])
    assert {} == as_json([PLAIN], images)["time_to_quality"]


@pytest.mark.parametrize("name", cli.RECIPES)
def test_every_algorithm_can_be_written_down(name: str, images: ImageSet) -> None:
    task = task_of(name)
    result = made_up("all", [[0.5]], 1.0, tuple(task.make_algorithms(list(task.algorithms))))

    texts = as_json([result], images)["recipes"][0]["algorithms"]
    assert [kind.__name__ for kind in task.algorithms.values()] == [text.partition("(")[0] for text in texts]
    assert not any("0x" in text for text in texts)


def test_an_algorithm_that_does_not_say_how_it_is_written_is_called_by_its_name(images: ImageSet) -> None:
    class Silent(Algorithm):
        def __init__(self, hidden: int = 3) -> None:
            pass

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    assert ["Silent"] == as_json([made_up("one", [[0.5]], 1.0, (Silent(),))], images)["recipes"][0]["algorithms"]


def test_the_report_lists_changed_modules_and_actions() -> None:
    text = printed([PLAIN, COMPOSED])

    # In the mean 0.91 is to be reached: after 2 of 3 parts of 1 second, of 2, and after all of 2 seconds, of 3.
    assert "plain -> composed: test accuracy 91.00% -> 95.50%, in 0.60 times the training time." in text
    assert (
        "composed reached and kept the 91.00% that plain has at its end, after 0.50 +- 0.24 of the time of plain."
        in text
    )
    assert "At the end, mean and standard deviation over 2 seeds" in text
    assert "Seconds and samples/s do not include evaluations." in text
    for heading in ("test accuracy", "test cross entropy", "seconds per run", "samples/s"):
        assert heading in text
    assert "the plan" in text
    assert "MixUp  did things" in text
    assert "`plain`" not in text  # it has no algorithms


def test_worse_metrics_are_reported() -> None:
    text = printed([COMPOSED, PLAIN])

    assert "composed -> plain: test accuracy 95.50% -> 91.00%, in 1.67 times the training time." in text
    assert "0 of 2 runs of plain reached and kept the 95.50% that composed has at its end." in text
    assert "plain is worse in test cross entropy (0.0450 -> 0.0900)." in text
    assert "is worse" not in printed([PLAIN, COMPOSED])


def test_how_many_runs_were_as_good_is_said_if_not_all_were() -> None:
    mixed = made_up("mixed", [[0.91], [0.90]], 1.0)

    assert "1 of 2 runs of mixed reached and kept the 91.00% that plain has at its end." in printed([PLAIN, mixed])


def test_a_metric_that_is_to_fall_is_compared_by_its_fall() -> None:
    def by_loss(result: Result) -> Result:
        return replace(result, recipe=replace(result.recipe, metrics=(LOSS,)))

    text = printed([by_loss(PLAIN), by_loss(COMPOSED)])

    assert "plain -> composed: test cross entropy 0.0900 -> 0.0450, in 0.60" in text
    assert "composed reached and kept the 0.0900 that plain has at its end, after" in text


def test_one_run_is_shown_without_a_spread() -> None:
    text = printed([made_up("plain", [[0.5]], 1.0), made_up("same", [[0.5]], 1.0)])

    assert "At the end, one run over 1 seed" in text
    assert "same reached and kept the 50.00% that plain has at its end, after 1.00 of the time of plain." in text
    assert "+-" not in text
