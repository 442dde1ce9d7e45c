from __future__ import annotations

import io
import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from rich.console import Console

from composer.algorithms.mixup import MixUp
from composer.recipes import Data, Recipe, Result, Run, Training, digits
from composer.recipes._data import ImageData, load_images
from composer.recipes._plot import draw_curves, save_curves
from composer.recipes._report import as_json, describe_data, print_report, write_json


def made_up(name: str, accuracies: list[list[float]], seconds: float, algorithms: tuple[Any, ...] = ()) -> Result:
    runs = [
        Run(seed, accuracy, [1 - a for a in accuracy], seconds + seed, seconds + 1, 100, {"MixUp": "did things"})
        for seed, accuracy in enumerate(accuracies)
    ]
    recipe = Recipe(name, algorithms, Data(data=Path("images")), training=Training(epochs=len(accuracies[0])))
    return Result(recipe, runs, "the plan", "cpu", 1234)


PLAIN = made_up("plain", [[0.2, 0.5, 0.90], [0.1, 0.6, 0.92]], 2.0)
COMPOSED = made_up("composed", [[0.3, 0.7, 0.94], [0.2, 0.8, 0.97]], 1.0, (MixUp(alpha=0.3),))


@pytest.fixture(scope="module")
def images() -> ImageData:
    return load_images(Data(train_samples=60, test_samples=50))


def printed(results: list[Result]) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(results, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_numbers_of_the_table_can_be_computed_from_the_json(images: ImageData, tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", as_json([PLAIN, COMPOSED], images))
    stored = json.loads((tmp_path / "results.json").read_text())
    text = printed([PLAIN, COMPOSED])

    for recipe in stored["recipes"]:
        last = [100 * run["accuracy"][-1] for run in recipe["runs"]]
        seconds = [run["train_seconds"] for run in recipe["runs"]]
        loss = fmean(run["loss"][-1] for run in recipe["runs"])
        speed = sum(run["images"] for run in recipe["runs"]) / sum(seconds)
        expected = [recipe["name"], f"{fmean(last):.2f} +- {stdev(last):.2f}%", f"{loss:.4f}"]
        expected += [f"{fmean(seconds):.1f}", f"{speed:,.0f}"]
        row = next(line for line in text.splitlines() if recipe["name"] in line)
        assert expected == [cell.strip() for cell in re.split(r"[^\w\s.,%+-]+", row) if cell.strip()]
        assert recipe["summary"]["accuracy"] == pytest.approx(fmean(last) / 100)
        assert recipe["summary"]["accuracy_spread"] == pytest.approx(stdev(last) / 100)
        assert recipe["summary"]["images_per_second"] == pytest.approx(speed)


def test_the_json_says_what_was_trained_with_what(images: ImageData) -> None:
    stored = as_json([PLAIN, COMPOSED], images)

    assert stored["data"] == {
        "name": "digits", "train_images": 60, "test_images": 50, "shape": [1, 16, 16], "num_classes": 10,
        "shift": 1, "flip": False,
    }  # fmt: skip
    assert stored["machine"]["torch"] == str(torch.__version__)
    composed = stored["recipes"][1]
    assert composed["algorithms"] == ["MixUp(alpha=0.3,interpolate_loss=False,input_key=0,target_key=1)"]
    assert (composed["hyperparameters"]["data"], composed["hyperparameters"]["epochs"]) == ("images", 3)
    assert (composed["plan"], composed["num_parameters"]) == (["the plan"], 1234)


def test_every_algorithm_can_be_written_down(images: ImageData) -> None:
    algorithms = digits.make_algorithms(list(digits.ALGORITHMS))
    result = made_up("all", [[0.5]], 1.0, tuple(algorithms))

    for text in as_json([result], images)["recipes"][0]["algorithms"]:
        assert "0x" not in text


def test_the_report_says_what_changed_and_what_the_algorithms_did() -> None:
    text = printed([PLAIN, COMPOSED])

    assert "plain -> composed: 9.00% -> 4.50% test errors (50% fewer), in 0.60 times the training time." in text
    assert "mean and standard deviation over 2 seeds" in text
    assert "the plan" in text
    assert "MixUp  did things" in text


def test_what_got_worse_is_said_too() -> None:
    assert "4.50% -> 9.00% test errors (100% more), in 1.67 times the training time." in printed([COMPOSED, PLAIN])


def test_without_errors_there_is_no_share_of_them() -> None:
    perfect = made_up("perfect", [[1.0], [1.0]], 1.0)

    assert "0.00% -> 0.00% test errors, in" in printed([perfect, perfect])


def test_one_run_is_shown_without_a_spread() -> None:
    text = printed([made_up("plain", [[0.5]], 1.0)])

    assert "one run over 1 seed" in text
    assert "50.00%" in text
    assert "+-" not in text


def test_the_data_are_described_in_a_line(images: ImageData) -> None:
    expected = "the handwritten digits of scikit-learn: 60 images to train on, 50 to test, 1x16x16 pixels, 10 classes"

    assert expected == describe_data(images)


def test_the_plot_has_title_axes_and_legend() -> None:
    figure = draw_curves([PLAIN, COMPOSED], "A title")
    left, right = figure.axes

    assert figure.get_suptitle() == "A title"
    assert (left.get_title(), left.get_xlabel(), left.get_ylabel()) == ("Accuracy", "epoch", "test accuracy (%)")
    assert (right.get_title(), right.get_xlabel(), right.get_ylabel()) == ("Loss", "epoch", "test cross entropy")
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["plain: 91.00%", "composed: 95.50%"]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["plain: 0.0900", "composed: 0.0450"]
    assert "mean of 2 seeds" in left.get_legend().get_title().get_text()


def test_the_curves_are_the_means_and_the_bands_reach_from_the_lowest_to_the_highest() -> None:
    left, _ = draw_curves([PLAIN, COMPOSED], "A title").axes

    assert left.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert left.lines[0].get_ydata() == pytest.approx([15, 55, 91])
    band = left.collections[1].get_paths()[0].vertices
    assert sorted({round(float(y)) for x, y in band if x == 2}) == [70, 80]


def test_the_end_of_every_curve_is_in_the_picture() -> None:
    for panel in draw_curves([PLAIN, COMPOSED], "A title").axes:
        low, high = panel.get_ylim()
        assert all(low <= line.get_ydata()[-1] <= high for line in panel.lines)


def test_a_single_epoch_of_a_single_run_can_be_drawn(tmp_path: Path) -> None:
    save_curves([made_up("plain", [[0.5]], 1.0)], "A title", tmp_path / "curves.png")

    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
