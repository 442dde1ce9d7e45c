from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import State, Time, TimeUnit
from composer.optim.scheduler import _convert_time

StateOf = Callable[..., State]


@pytest.mark.parametrize(
    ("time", "max_duration", "ssr", "expected"),
    [
        ("10ep", "1000ep", 1.0, "10000ba"),
        ("10ep", "1000ep", 0.5, "5000ba"),
        ("10ep", "20ba", 1.0, "10000ba"),
        ("7ba", "1000ep", 0.5, "3ba"),
        ("7ba", "1000ep", 3.0, "21ba"),
        ("100sp", "1000ep", 0.25, "25sp"),
        ("100tok", "1000ep", 0.25, "25tok"),
        ("0.5dur", "1000ep", 1.0, "500000ba"),
        ("0.5dur", "500ep", 0.5, "250000ba"),
        ("0.3dur", "15ba", 0.5, "4ba"),
        ("0.5dur", "999sp", 1.0, "499sp"),
        ("1dur", "30tok", 0.1, "30tok"),
        ("7ba", "30sec", 1.0, "7ba"),
        ("2ep", "30sec", 0.5, "1000ba"),
    ],
)
def test_times_convert_to_integers_of_a_counted_unit(
    time: str, max_duration: str, ssr: float, expected: str, state_of: StateOf
) -> None:
    assert Time.from_timestring(expected) == _convert_time(time, state_of(max_duration), ssr)


def test_a_time_object_is_converted_like_its_string(state_of: StateOf) -> None:
    assert _convert_time(Time(3, "ep"), state_of()) == "3000ba"


@pytest.mark.parametrize("max_duration", [None, "1000ep", "20ba"])
def test_seconds_are_refused_in_a_run_of_something_else(max_duration: str | None, state_of: StateOf) -> None:
    with pytest.raises(ValueError, match=r"must not be in seconds unless `max_duration` is, got Time\(30, "):
        _convert_time("30sec", state_of(max_duration))


@pytest.mark.parametrize(
    ("time", "ssr", "expected"),
    [("0.3dur", 1.0, 0.3), ("0.3dur", 0.5, 0.3), ("10sec", 1.0, 0.25), ("40sec", 0.5, 0.5), ("1m20s", 1.0, 2.0)],
)
def test_in_a_run_of_seconds_times_convert_to_exact_fractions(
    time: str, ssr: float, expected: float, state_of: StateOf
) -> None:
    assert _convert_time(time, state_of("40sec"), ssr) == Time(expected, "dur")


def test_a_duration_needs_a_max_duration(state_of: StateOf) -> None:
    with pytest.raises(RuntimeError, match=r"`state.max_duration` must be set"):
        _convert_time("0.5dur", state_of(None))


@pytest.mark.parametrize("time", ["1ep", "0.5dur"])
def test_epochs_need_a_dataloader_with_a_length(time: str, state_of: StateOf) -> None:
    with pytest.raises(RuntimeError, match="The number of batches in an epoch must be known"):
        _convert_time(time, state_of("10ep", None))


@given(value=st.integers(0, 10**9), unit=st.sampled_from(["ba", "sp", "tok"]), ssr=st.floats(0.01, 10.0))
def test_counted_units_are_scaled_and_rounded_down(value: int, unit: str, ssr: float, state_of: StateOf) -> None:
    converted = _convert_time(Time(value, unit), state_of(), ssr)

    assert converted.unit is TimeUnit(unit)
    assert converted.value <= value * ssr < converted.value + 1


@given(fraction=st.floats(0.0, 1.0), epochs=st.integers(1, 500), ssr=st.floats(0.01, 10.0))
def test_a_fraction_of_the_run_ignores_the_ratio_and_lies_within_the_run(
    fraction: float, epochs: int, ssr: float, state_of: StateOf
) -> None:
    state = state_of(f"{epochs}ep")
    converted = _convert_time(Time(fraction, "dur"), state, ssr)

    assert converted == _convert_time(Time(fraction, "dur"), state)
    assert converted.unit is TimeUnit.BATCH
    assert 0 <= converted.value <= epochs * 1000
    assert _convert_time("1dur", state).value == epochs * 1000


@given(epochs=st.integers(0, 10**4), ssr=st.floats(0.01, 10.0))
def test_epochs_are_scaled_as_batches(epochs: int, ssr: float, state_of: StateOf) -> None:
    state = state_of()

    assert _convert_time(f"{epochs * 1000}ba", state, ssr) == _convert_time(f"{epochs}ep", state, ssr)
