from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.algorithms.ema import EMA
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM
from composer.algorithms.scale_schedule import ScaleSchedule
from composer.core import Algorithm, Event, Placement, State
from composer.loggers import Logger
from composer.recipes import SGD, Comparison, Recipe, Result, Runs, compare, digits, run

Make = Callable[..., Recipe]


def numbers(result: Result) -> list[tuple[int, dict[str, list[float]], int]]:
    """Return the parts of a result that must not depend on the clock."""
    return [(each.seed, each.scores, each.samples) for each in result.runs]


def test_a_second_run_gives_the_same_numbers_to_the_last_bit(tiny: Make, quiet: Runs) -> None:
    recipe = tiny(algorithms=(MixUp(), EMA(half_life="2ba")))

    first = run(recipe, quiet)
    torch.rand(3)
    second = run(recipe, quiet)

    assert numbers(first) == numbers(second)


def test_a_run_does_not_depend_on_other_recipes_and_seeds(tiny: Make, quiet: Runs, one: Runs) -> None:
    both = compare([tiny("plain"), tiny("mixed", (MixUp(),))], quiet)

    alone = run(tiny("mixed", (MixUp(),)), replace(one, seed=1))

    assert ["plain", "mixed"] == [result.recipe.name for result in both]
    assert numbers(both[1])[1:] == numbers(alone)


def test_a_run_does_not_depend_on_how_often_it_is_tested(tiny: Make, one: Runs) -> None:
    seldom, often = (run(tiny(), replace(one, eval_interval=each)).runs[0] for each in ("2ep", "1ba"))

    for key, values in seldom.scores.items():
        assert values == often.scores[key][-1:]
    assert 6 == len(often.tested_at)


def test_recipes_on_the_same_data_share_them(tiny: Make, one: Runs) -> None:
    other = replace(tiny("other"), data=digits.Data(train_samples=40, batch_size=20, test_samples=50))

    first, second, third = Comparison([tiny("first"), tiny("second"), other], one).datasets

    assert first is second
    assert [60, 40] == [second.num_train, third.num_train]


def test_seeds_are_counted_up_and_differ(tiny: Make, quiet: Runs) -> None:
    result = run(tiny(), replace(quiet, seed=7))

    assert [7, 8] == [each.seed for each in result.runs]
    assert result.runs[0].scores["CrossEntropy"] != result.runs[1].scores["CrossEntropy"]


def test_every_epoch_is_tested_and_every_sample_counted(tiny: Make, quiet: Runs) -> None:
    result = run(tiny(epochs=3), quiet)

    for each in result.runs:
        assert {"MulticlassAccuracy": 3, "CrossEntropy": 3} == {key: len(each.scores[key]) for key in each.scores}
        assert (3, 180) == (len(each.tested_at), each.samples)
        assert 0 < each.train_seconds < each.seconds


def test_training_learns(one: Runs) -> None:
    recipe = digits.plain(digits.Data(batch_size=25, test_samples=200), training=SGD(epochs=3))

    result = run(recipe, one)

    losses = result.runs[0].scores["CrossEntropy"]
    assert result.mean() > 0.3  # chance is 0.1
    assert losses[-1] < losses[0]


def test_it_trains_with_the_requested_threads(tiny: Make, one: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    run(tiny(), replace(one, threads=3))

    assert 3 == given[0]  # while the recipes are checked, and while they train
    assert [3, given[1]] == given[2:]


def test_the_result_has_the_threads_of_the_runs(tiny: Make, one: Runs) -> None:
    outside = torch.get_num_threads()

    result = run(tiny(), replace(one, threads=outside + 1))

    assert outside + 1 == result.threads
    assert outside == torch.get_num_threads()


def test_the_whole_step_is_compiled_if_asked(tiny: Make, one: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(*arguments: Any, **options: Any) -> Any:
        asked.append((options["compile_config"], options["compile_step"]))
        raise KeyError

    monkeypatch.setattr("composer.recipes.runner.trainer_of_run", record)
    for kind in (None, "model", "step"):
        with pytest.raises(KeyError):
            run(tiny(), replace(one, compile=kind))

    assert asked == [(None, False), ({}, False), ({}, True)]


def torch_flags() -> tuple[bool | int, ...]:
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    return *cudnn, torch.utils.deterministic.fill_uninitialized_memory, torch.get_num_threads()


def test_nothing_outside_is_changed(tiny: Make, quiet: Runs) -> None:
    algorithm = MixUp()
    flags = torch_flags()
    torch.manual_seed(3)
    random.seed(3)
    state, drawn = torch.get_rng_state(), random.getstate()

    run(tiny(algorithms=(algorithm,)), quiet)

    assert torch.equal(state, torch.get_rng_state())
    assert drawn == random.getstate()
    assert not torch.are_deterministic_algorithms_enabled()
    assert flags == torch_flags()
    assert algorithm.indices is None  # it was copied


class Recorder(Algorithm):
    """Writes down the learning rate of each batch; copies are itself."""

    events = frozenset({Event.BATCH_START})

    def __init__(self) -> None:
        self.rates: list[float] = []

    def __deepcopy__(self, memo: object) -> Recorder:
        return self

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_learning_rate_rises_then_falls_to_zero_also_in_a_shortened_run(one: Runs, ratio: float) -> None:
    recorder, length = Recorder(), round(20 * ratio)
    data = digits.Data(train_samples=20, batch_size=20, test_samples=10)
    algorithms = [recorder, ScaleSchedule(ratio)]
    recipe = digits.composed(data, digits.Network(width=8), SGD(epochs=20, lr=0.5, warmup=0.2), algorithms)
    (each,) = run(recipe, one).runs

    def rate(batches: int) -> float:
        rising = 0.2 * length
        if batches < rising:
            return 0.5 * batches / rising
        return 0.5 * (1 + math.cos(math.pi * (batches - rising) / (length - rising))) / 2

    assert 20 * length == each.samples
    # The first two are of the warm-up. Schedulers are stepped before the batch is counted, as in the reference Trainer.
    assert pytest.approx([0, 0, 0, *map(rate, range(length - 1))]) == recorder.rates


def test_a_warm_up_of_less_than_a_batch_is_left_out(tiny: Make, quiet: Runs) -> None:
    recipe = replace(tiny(), training=SGD(epochs=1, warmup=0.1))

    assert 1 == len(run(recipe, quiet).runs[0].tested_at)


def test_a_bar_shows_recipe_and_seed(tiny: Make, one: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = [tiny("plain"), tiny("composed", (MixUp(),))]
    compare(recipes, replace(one, seed=4, progress=True))
    text = capsys.readouterr().err

    assert re.search(r"plain    seed 4.* 6/6", text)
    assert re.search(r"composed seed 4.* 6/6", text)


def test_there_must_be_something_to_compare() -> None:
    with pytest.raises(ValueError, match="`recipes` must have at least one recipe, got none"):
        compare([])


def test_data_that_do_not_fit_are_refused_before_training(tiny: Make, one: Runs) -> None:
    with pytest.raises(ValueError, match="`train_samples` must be at most 500"):
        Comparison([tiny(), replace(tiny(), data=digits.Data(train_samples=501))], one)


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

    assert [tmp_path / f"{name}-seed{seed}" for name in ("plain", "mixed") for seed in (0, 1)] == comparison.folders
    assert not stale.exists()
    assert [numbers(result) for result in silent] == [numbers(result) for result in recorded]
    of: dict[str, Any] = {}
    for folder in comparison.folders:
        records = [json.loads(line) for line in (folder / "run-rank0.jsonl").read_text().splitlines()]
        of = {record["type"]: record for record in records}
        assert (folder.name, folder.name.partition("-")[0]) == (of["start"]["run_name"], of["start"]["group"])
        assert "finished" == of["end"]["status"]
        hyperparameters = {k: v for r in records if r["type"] == "hyperparameters" for k, v in r["values"].items()}
        assert (20, 2) == (hyperparameters["data/batch_size"], hyperparameters["training/epochs"])
        keys = {key for record in records if record["type"] == "metrics" for key in record["values"]}
        assert {"loss/train/total", "metrics/test/MulticlassAccuracy", "lr-SGD/group0"} <= keys


def test_a_run_shows_its_progress_and_not_its_settings(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Comparison([tiny("plain")], Runs(device="cpu", threads=1), folder=tmp_path).run()

    shown = capsys.readouterr().err
    assert "100% 6/6" in shown
    assert "training/epochs" not in shown


class Counter(Algorithm):
    events = frozenset({Event.FIT_START, Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Idle(Counter):
    def match(self, event: Event, state: State) -> bool:
        return False


def test_the_calls_of_an_algorithm_are_counted_event_by_event(tiny: Make, one: Runs) -> None:
    result = run(tiny(algorithms=(Counter(), Idle())), one)

    actions = {"Counter": "acted 1 time at fit_start, 6 times at batch_end", "Idle": "did nothing"}
    assert actions == result.runs[0].actions
    assert all(name in result.plan for name in actions)
    assert "logger" not in result.plan
    assert "callback" not in result.plan


def test_nothing_is_recorded_without_a_folder(tiny: Make, quiet: Runs, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run(tiny(), quiet)

    assert [] == Comparison([tiny()], quiet).folders
    assert [] == list(tmp_path.iterdir())


class Interrupted(Exception):
    pass


class Interruption(Algorithm):
    """Ends the process, as it were, before a batch, and lists the batches; copies are itself."""

    events = frozenset({Event.BATCH_START})

    def __init__(self) -> None:
        self.batch: int | None = None
        self.trained: list[int] = []

    def __deepcopy__(self, memo: object) -> Interruption:
        return self

    def __repr__(self) -> str:
        return "Interruption()"

    def match(self, event: Event, state: State) -> bool:
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if len(state.callbacks) > 2:  # not while it warms up
            if state.timestamp.batch == self.batch:
                raise Interrupted
            self.trained.append(state.timestamp.batch.value)


def test_an_interrupted_run_goes_on(tiny: Make, one: Runs, tmp_path: Path) -> None:
    interruption = Interruption()
    recipe = tiny(algorithms=(MixUp(), EMA(half_life="2ba"), interruption), epochs=3)
    once = replace(one, eval_interval="2ba", seeds=2)
    saved = replace(once, save_folder=str(tmp_path / "saved"))
    whole = run(recipe, once)
    for interruption.batch in (5, 7):
        with pytest.raises(Interrupted):
            run(recipe, saved)
    interruption.batch = None
    interruption.trained.clear()
    resumed = run(recipe, saved)
    again = run(recipe, saved)

    assert interruption.trained == [*range(6, 9), *range(9)]  # the rest of the first seed, the second one, and no more
    assert numbers(whole) == numbers(resumed) == numbers(again)
    assert [each.actions["MixUp"] for each in whole.runs] == [each.actions["MixUp"] for each in resumed.runs]
    for each in (*resumed.runs, *again.runs):
        assert len(each.tested_at) == len(whole.runs[0].tested_at)
        assert sorted(each.tested_at) == each.tested_at
        assert 0 < each.train_seconds < each.seconds


def test_other_options_are_other_runs(tiny: Make, one: Runs, tmp_path: Path) -> None:
    saved = replace(one, save_folder=str(tmp_path / "saved"))
    run(tiny(), saved)
    other = replace(tiny(), training=SGD(epochs=2, lr=0.01))

    assert numbers(run(other, saved)) == numbers(run(other, one)) != numbers(run(tiny(), one))
    assert len(list((tmp_path / "saved").iterdir())) == 2
    with pytest.raises(ValueError, match="`save_folder` must be a folder or a URI"):
        Runs(save_folder="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_a_recipe_trains_on_a_gpu(tiny: Make, one: Runs, precision: str) -> None:
    result = run(tiny("mixed", (MixUp(),)), replace(one, device="gpu", precision=precision)).runs[0]

    assert len(result.scores["CrossEntropy"]) == 2
    assert all(map(math.isfinite, result.scores["CrossEntropy"]))
    assert result.train_seconds > 0
