from __future__ import annotations

from statistics import fmean, stdev

import pytest

from composer.recipes import SGD, Metric, Recipe, Result, Run, digits, noise_of_time_to_quality, time_to_quality
from composer.recipes._results import TimeToQuality

UP = Metric("Up", "up")
DOWN = Metric("Down", "down", higher_is_better=False)


def made_up(curves: list[list[float]], seconds: list[float], metric: Metric = UP) -> Result:
    """One run for each curve, tested at even steps of its time."""
    runs = [
        Run(seed, {metric.key: curve}, [time * (i + 1) / len(curve) for i in range(len(curve))], time, time + 1, 100)
        for seed, (curve, time) in enumerate(zip(curves, seconds, strict=True))
    ]
    return Result(Recipe("made up", digits.Data(), digits.Network(), SGD(), [metric]), runs, "", "cpu", 1, 1)


def test_the_first_evaluation_that_is_as_good_with_all_later_ones_counts() -> None:
    base = made_up([[0.1, 0.8], [0.2, 0.6]], [10.0, 20.0])  # at the end 0.7 in the mean
    other = made_up([[0.3, 0.7, 0.6, 0.9], [0.5, 0.6, 0.65, 0.8]], [4.0, 8.0])

    found = time_to_quality(base, other)

    assert 0.7 == found.goal == base.mean()
    assert [4.0 / 10.0, 8.0 / 20.0] == found.ratios == found.reached  # 0.7 at 2 seconds was not kept
    assert fmean(found.ratios) == found.mean  # type: ignore[type-var, arg-type]
    assert 0.0 == found.spread


def test_a_run_that_never_is_as_good_has_no_ratio_and_all_of_them_no_mean() -> None:
    base = made_up([[0.5], [0.5], [0.5]], [10.0, 10.0, 10.0])
    other = made_up([[0.5, 0.6], [0.4, 0.4], [0.4, 0.5]], [5.0, 5.0, 5.0])

    found = time_to_quality(base, other)

    assert [0.25, None, 0.5] == found.ratios
    assert [0.25, 0.5] == found.reached
    assert found.mean is None
    assert stdev([0.25, 0.5]) == found.spread


def test_if_no_run_is_as_good_there_is_nothing_to_tell() -> None:
    found = time_to_quality(made_up([[0.5]], [1.0]), made_up([[0.4]], [1.0]))

    assert TimeToQuality(0.5, [None]) == found
    assert ([], None, 0.0) == (found.reached, found.mean, found.spread)


def test_a_metric_that_is_to_fall_is_reached_from_above() -> None:
    base = made_up([[3.0, 1.0]], [10.0], DOWN)
    other = made_up([[2.0, 1.5, 0.9, 0.1]], [8.0], DOWN)

    assert TimeToQuality(1.0, [6.0 / 10.0]) == time_to_quality(base, other)


def test_a_recipe_is_as_good_as_itself_at_its_end_or_before() -> None:
    result = made_up([[0.1, 0.9, 0.5]], [9.0])

    assert TimeToQuality(0.5, [6.0 / 9.0]) == time_to_quality(result, result)


def test_a_touch_that_is_lost_again_does_not_count() -> None:
    base = made_up([[0.5]], [10.0])

    assert [None] == time_to_quality(base, made_up([[0.6, 0.4]], [10.0])).ratios


def test_chance_is_shown_by_each_run_against_the_mean_of_the_others() -> None:
    base = made_up([[0.6, 0.4, 0.6], [0.5, 0.5, 0.5], [0.1, 0.6, 0.7]], [3.0, 3.0, 3.0])

    found = noise_of_time_to_quality(base)  # the goals are 0.6, 0.65 and 0.55

    assert found is not None
    assert [1.0, None, 2.0 / 3.0] == found.ratios
    assert base.mean() == found.goal
    assert noise_of_time_to_quality(made_up([[0.5]], [1.0])) is None


def test_runs_that_do_not_belong_together_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"runs of the same seeds to be compared, got \[0, 1\] and \[0\]"):
        time_to_quality(made_up([[0.5], [0.5]], [1.0, 1.0]), made_up([[0.5]], [1.0]))


def test_the_summary_is_that_of_the_ends() -> None:
    result = made_up([[0.1, 0.5], [0.9, 0.7]], [2.0, 4.0])

    assert [0.5, 0.7] == result.finals() == result.finals(UP)
    assert fmean([0.5, 0.7]) == result.mean()
    assert stdev([0.5, 0.7]) == result.spread()
    assert UP == result.metric
    assert 3.0 == result.train_seconds
    assert 200 / 6.0 == result.samples_per_second


def test_one_run_has_no_spread() -> None:
    assert 0 == made_up([[0.5]], [1.0]).spread()
