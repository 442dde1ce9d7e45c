from __future__ import annotations

from pathlib import Path

import pytest

from composer.recipes import Metric
from composer.recipes._recipe import find_data

ACCURACY = Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2)
LOSS = Metric("CrossEntropy", "cross entropy", higher_is_better=False)


def test_values_are_shown_scaled_with_their_unit_and_their_spread() -> None:
    assert "93.58%" == ACCURACY.show(0.93584)
    assert "93.58 +- 1.20%" == ACCURACY.show(0.93584, 0.012)
    assert "93.58 +- 0.00%" == ACCURACY.show(0.93584, 0.0)
    assert "0.2346" == LOSS.show(0.23456)


@pytest.mark.parametrize(("value", "higher", "lower"), [(0.4, False, True), (0.5, True, True), (0.6, True, False)])
def test_a_goal_is_reached_from_one_side_and_by_being_equal(value: float, higher: bool, lower: bool) -> None:
    assert (higher, lower) == (ACCURACY.reaches(value, 0.5), LOSS.reaches(value, 0.5))


def test_an_argument_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_DATA", "environment")

    assert Path("given") == find_data(Path("given"))
    assert Path("environment") == find_data(None)


@pytest.mark.parametrize("environment", [None, ""])
def test_somewhere_the_data_must_be(environment: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if environment is not None:
        monkeypatch.setenv("COMPOSER_DATA", environment)

    with pytest.raises(FileNotFoundError, match=r"`data` must name the folder .* got none\. .* variable COMPOSER_DATA"):
        find_data(None)
