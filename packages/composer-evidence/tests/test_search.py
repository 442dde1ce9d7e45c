from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.evidence import Grid
from composer.evidence.search import search


def parabola(best: dict[str, float]) -> Any:
    def evaluate(points: list[dict[str, Any]]) -> list[float]:
        return [-sum(math.log2(point[name] / value) ** 2 for name, value in best.items()) for point in points]

    return evaluate


@given(st.integers(-3, 4), st.sampled_from([1.0, -1.0]))
def test_a_grid_is_extended_until_the_best_value_is_inside(power: int, sign: float) -> None:
    def evaluate(points: list[dict[str, Any]]) -> list[float]:
        return [-sign * math.log2(point["lr"] / 2.0**power) ** 2 for point in points]

    found = search({"lr": Grid((1.0, 2.0))}, {"lr": 1.0}, evaluate, higher_is_better=sign > 0)

    assert found.best.point == {"lr": 2.0**power}
    assert min(found.grid["lr"]) < 2.0**power < max(found.grid["lr"])


@pytest.mark.parametrize("upwards", [True, False])
def test_an_optimum_beyond_a_bound_is_sought_up_to_the_bound_which_is_reported(upwards: bool) -> None:
    grid = Grid((0.1, 0.3), low=0.02, high=0.7)
    best = {"warmup": 2.0 if upwards else 1e-3}
    found = search({"warmup": grid}, {"warmup": 0.1}, parabola(best), higher_is_better=True)

    assert found.best.point == {"warmup": 0.7 if upwards else 0.02}
    assert found.at_bound == ("warmup",)


@pytest.mark.parametrize("upwards", [True, False])
def test_an_optimum_between_the_grid_and_its_bound_is_found(upwards: bool) -> None:
    best = {"lr": 60.0 if upwards else 0.03}
    found = search({"lr": Grid((1.0, 2.0))}, {"lr": 1.0}, parabola(best), higher_is_better=True)

    assert found.best.point == {"lr": 64.0 if upwards else pytest.approx(0.0312, rel=0.01)}
    assert found.at_bound == ()


def test_a_grid_is_extended_even_when_the_trials_are_used_up() -> None:
    found = search({"lr": Grid((1.0, 2.0))}, {"lr": 1.0}, parabola({"lr": 9.0}), higher_is_better=True, max_trials=2)

    assert found.best.point == {"lr": 8.0}
    assert len(found.trials) == 5


def test_settings_are_searched_one_after_the_other_and_points_are_evaluated_once() -> None:
    seen: list[dict[str, Any]] = []

    def evaluate(points: list[dict[str, Any]]) -> list[float]:
        seen.extend(points)
        return parabola({"lr": 2.0, "wd": 4.0})(points)

    grid = {"lr": Grid((1.0, 2.0, 4.0)), "wd": Grid((2.0, 4.0, 8.0))}
    found = search(grid, {"lr": 1.0, "wd": 2.0}, evaluate, higher_is_better=True)

    assert found.best.point == {"lr": 2.0, "wd": 4.0}
    assert len(seen) == len(found.trials) == 7  # 5, and the neighbors of the best point that are new
    assert all(seen.count(point) == 1 for point in seen)


def test_the_number_of_trials_is_limited_and_the_start_comes_first() -> None:
    grid = {"lr": Grid((1.0, 2.0, 4.0, 8.0))}
    found = search(grid, {"lr": 2.0}, parabola({"lr": 8.0}), higher_is_better=True, max_trials=2)

    assert [trial.point["lr"] for trial in found.trials] == [2.0, 1.0]
    assert found.best.point == {"lr": 2.0}


def test_words_are_tried_without_an_order() -> None:
    found = search(
        {"kind": Grid(("a", "b"))},
        {"kind": "a"},
        lambda points: [float(point["kind"] == "b") for point in points],
        higher_is_better=True,
    )

    assert found.best.point == {"kind": "b"}


def test_a_start_outside_the_grid_is_one_of_its_values() -> None:
    found = search({"lr": Grid((1.0, 4.0))}, {"lr": 2.0}, parabola({"lr": 2.0}), higher_is_better=True)

    assert found.grid["lr"] == (1.0, 2.0, 4.0)


def test_failed_trials_are_not_best_and_a_search_without_others_is_an_error() -> None:
    def evaluate(points: list[dict[str, Any]]) -> list[float]:
        return [math.nan if point["lr"] > 1 else 0.0 for point in points]

    assert search({"lr": Grid((1.0, 2.0))}, {"lr": 2.0}, evaluate, higher_is_better=True).best.point == {"lr": 1.0}
    with pytest.raises(ValueError, match="All trials"):
        search({"lr": Grid((2.0, 4.0))}, {"lr": 2.0}, evaluate, higher_is_better=True)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [((), {}, "at least one"), ((2.0, 1.0), {}, "sorted"), ((0.5, 2.0), {"high": 1.0}, "from 0.005 to 1.0")],
)
def test_bad_grids_are_refused(values: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(values, **options)


def test_settings_that_depend_on_each_other_are_searched_again() -> None:
    def ridge(points: list[dict[str, Any]]) -> list[float]:
        # With a short warmup only a low rate trains; with a long one a higher rate is best.
        best = {0.1: 1.0, 0.3: 4.0}
        return [10 * p["warmup"] - abs(math.log2(p["lr"] / best[p["warmup"]])) / 4 for p in points]

    grid = {"lr": Grid((1.0, 2.0, 4.0), low=0.5, high=8.0), "warmup": Grid((0.1, 0.3), low=0.1, high=0.3)}
    found = search(grid, {"lr": 1.0, "warmup": 0.1}, ridge, higher_is_better=True)

    assert found.best.point == {"lr": 4.0, "warmup": 0.3}


def test_a_grid_of_integers_is_extended_by_integers() -> None:
    assert repr(Grid((3, 6), low=1).extended(upwards=False)) == "2"
    assert repr(Grid((16, 32)).extended(upwards=True)) == "64"
    assert Grid((1, 2)).extended(upwards=False) is None
    assert repr(Grid((4.0, 8.0)).extended(upwards=True)) == "16.0"


def test_a_grid_from_zero_is_only_extended_upwards() -> None:
    assert Grid((0.0, 0.1)).extended(upwards=False) is None
    assert Grid((0.0, 0.1, 0.2)).extended(upwards=True) == pytest.approx(0.4)
    assert Grid((1.0,)).extended(upwards=True) is None
