from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer.algorithms.ema import EMA
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM
from composer.core import Algorithm, Event, Placement
from composer.recipes import Comparison, Data, Recipe, Result, Runs, Training, compare, run

Make = Callable[..., Recipe]


def numbers(result: Result) -> list[tuple[int, list[float], list[float], int]]:
    """What of a result must not depend on the clock."""
    return [(each.seed, each.accuracy, each.loss, each.images) for each in result.runs]


def test_a_second_run_gives_the_same_numbers_to_the_last_bit(tiny: Make, quiet: Runs) -> None:
    recipe = tiny(algorithms=(MixUp(), EMA(half_life="2ba")))

    first = run(recipe, quiet)
    torch.rand(3)
    second = run(recipe, quiet)

    assert numbers(first) == numbers(second)


def test_a_run_does_not_depend_on_what_it_is_compared_with_or_which_seeds_came_before(tiny: Make, quiet: Runs) -> None:
    both = compare([tiny("plain"), tiny("mixed", (MixUp(),))], quiet)

    alone = run(tiny("mixed", (MixUp(),)), Runs(seeds=1, seed=1, device="cpu", progress=False))

    assert [result.recipe.name for result in both] == ["plain", "mixed"]
    assert numbers(both[1])[1:] == numbers(alone)


def test_seeds_are_counted_up_and_differ(tiny: Make) -> None:
    result = run(tiny(), Runs(seeds=2, seed=7, device="cpu", progress=False))

    assert [each.seed for each in result.runs] == [7, 8]
    assert result.runs[0].loss != result.runs[1].loss


def test_every_epoch_is_tested_and_every_image_counted(tiny: Make, quiet: Runs) -> None:
    result = run(tiny(epochs=3), quiet)

    for each in result.runs:
        assert (len(each.accuracy), len(each.loss), each.images) == (3, 3, 180)
        assert 0 < each.train_seconds < each.seconds


def test_the_summary_is_that_of_the_last_epochs(tiny: Make, quiet: Runs) -> None:
    result = run(tiny(), quiet)
    last = np.array([each.accuracy[-1] for each in result.runs])

    assert result.accuracy == pytest.approx(last.mean())
    assert result.accuracy_spread == pytest.approx(last.std(ddof=1))
    seconds = sum(each.train_seconds for each in result.runs)
    assert result.images_per_second == pytest.approx(2 * 120 / seconds)
    assert result.train_seconds == pytest.approx(seconds / 2)
    assert result.loss == pytest.approx(np.mean([each.loss[-1] for each in result.runs]))


def test_one_run_has_no_spread(tiny: Make) -> None:
    assert run(tiny(), Runs(seeds=1, device="cpu", progress=False)).accuracy_spread == 0


def test_training_learns(quiet: Runs) -> None:
    recipe = Recipe("plain", data=Data(batch_size=25, test_samples=200), training=Training(epochs=3))

    result = run(recipe, quiet)

    assert result.accuracy > 0.3  # chance is 0.1
    assert result.runs[0].loss[-1] < result.runs[0].loss[0]


def test_it_trains_on_the_threads_it_is_told_to(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    run(tiny(), Runs(seeds=1, threads=3, device="cpu", progress=False))

    assert given[0] == 3  # while the recipes are checked, and while they train
    assert given[2:] == [3, given[1]]


def test_nothing_outside_is_changed(tiny: Make, quiet: Runs) -> None:
    algorithm = MixUp()
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_num_threads()
    torch.manual_seed(3)
    random.seed(3)
    state, drawn = torch.get_rng_state(), random.getstate()

    run(tiny(algorithms=(algorithm,)), quiet)

    assert torch.equal(state, torch.get_rng_state())
    assert drawn == random.getstate()
    assert not torch.are_deterministic_algorithms_enabled()
    assert flags == (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_num_threads())
    assert algorithm.indices is None  # it was copied


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates: list[float] = []

    class Recorder(Algorithm):
        events = frozenset({Event.BATCH_START})

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

        def __deepcopy__(self, memo: object) -> Recorder:
            return self

    training = Training(epochs=10, lr=0.5, warmup=0.2)
    recipe = Recipe("watched", (Recorder(),), Data(train_samples=20, batch_size=20, test_samples=10), training=training)
    run(recipe, Runs(seeds=1, device="cpu", progress=False))

    rates = rates[-10:]  # of the run, after the warm-up
    peak = rates.index(max(rates))
    assert rates[0] == 0
    assert rates[peak] == 0.5
    assert 0 < peak < 5
    assert sorted(rates[:peak]) == rates[:peak]
    assert sorted(rates[peak:], reverse=True) == rates[peak:]
    assert 0 < rates[-1] < 0.1


def test_a_warm_up_of_less_than_a_batch_is_left_out(tiny: Make, quiet: Runs) -> None:
    recipe = tiny(epochs=1)

    assert len(run(recipe, quiet).runs[0].accuracy) == 1


def test_a_bar_shows_recipe_seed_and_accuracy(tiny: Make, capsys: pytest.CaptureFixture[str]) -> None:
    compare([tiny("plain"), tiny("composed", (MixUp(),))], Runs(seeds=1, seed=4, device="cpu"))
    lines = capsys.readouterr().err.splitlines()

    assert [line[:15] for line in lines] == ["plain    seed 4", "composed seed 4"]
    assert all("6/6" in line and "loss/train/total=" in line and "Accuracy=" in line for line in lines)


def test_there_must_be_something_to_compare() -> None:
    with pytest.raises(ValueError, match="`recipes` must hold at least one recipe, got none"):
        compare([])


def test_a_comparison_can_be_run_again(tiny: Make, quiet: Runs) -> None:
    comparison = Comparison([tiny()], quiet)

    first, second = comparison.run(), comparison.run()

    assert numbers(first[0]) == numbers(second[0])


def test_algorithms_that_exclude_each_other_are_refused_before_training(tiny: Make, quiet: Runs) -> None:
    class Other(Algorithm):
        placement = Placement(excludes=SAM.placement.provides)

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            raise AssertionError("it must not come to this")

    with pytest.raises(ValueError, match="SAM"):
        Comparison([tiny(algorithms=(SAM(), Other()))], quiet)


def test_each_run_is_recorded_in_a_folder_of_its_own(tiny: Make, quiet: Runs, tmp_path: Path) -> None:
    recipes = [tiny("plain"), tiny("mixed", (MixUp(),))]
    stale = tmp_path / "mixed-seed7" / "run-rank0.jsonl"
    stale.parent.mkdir()
    stale.write_text("of an earlier comparison")
    comparison = Comparison(recipes, quiet, folder=tmp_path)
    recorded = comparison.run()
    silent = compare(recipes, quiet)

    assert comparison.folders == [tmp_path / f"{name}-seed{seed}" for name in ("plain", "mixed") for seed in (0, 1)]
    assert not stale.exists()
    assert [numbers(result) for result in recorded] == [numbers(result) for result in silent]
    for folder in comparison.folders:
        records = [json.loads(line) for line in (folder / "run-rank0.jsonl").read_text().splitlines()]
        of = {record["type"]: record for record in records}
        assert (of["start"]["run_name"], of["start"]["group"]) == (folder.name, folder.name.partition("-")[0])
        assert of["end"]["status"] == "finished"
        hyperparameters = {k: v for r in records if r["type"] == "hyperparameters" for k, v in r["values"].items()}
        assert (hyperparameters["data/batch_size"], hyperparameters["training/epochs"]) == (20, 2)
        keys = {key for record in records if record["type"] == "metrics" for key in record["values"]}
        assert {"loss/train/total", "metrics/test/MulticlassAccuracy", "lr-SGD/group0"} <= keys
    assert of["table"]["rows"] == [["MixUp", "mixed the images of 6 batches in pairs"]]


def test_nothing_is_recorded_unless_asked_for(tiny: Make, quiet: Runs, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    assert Comparison([tiny()], quiet).folders == []
    run(tiny(), quiet)
    assert list(tmp_path.iterdir()) == []
