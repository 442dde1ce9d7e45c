"""Time and Timestamp: parsing, arithmetic, comparison, progress."""

from __future__ import annotations

import copy
import datetime
import operator
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Time, Timestamp, TimeUnit, ensure_time

UNITS = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
whole = st.integers(min_value=0, max_value=2**62)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1ep", Time(1, TimeUnit.EPOCH)),
        ("2iter", Time(2, TimeUnit.ITERATION)),
        ("10BA", Time(10, TimeUnit.BATCH)),
        ("3e10sp", Time(30_000_000_000, TimeUnit.SAMPLE)),
        ("4_000tok", Time(4000, TimeUnit.TOKEN)),
        ("3_0e10sp", Time(300_000_000_000, TimeUnit.SAMPLE)),
        ("030.0sp", Time(30, TimeUnit.SAMPLE)),
        ("0.5dur", Time(0.5, TimeUnit.DURATION)),
        ("1e-1dur", Time(0.1, TimeUnit.DURATION)),
        ("20sec", Time(20, TimeUnit.SECOND)),
        ("1h20m40s", Time(4840, TimeUnit.SECOND)),
        ("40s", Time(40, TimeUnit.SECOND)),
        ("1h40s", Time(3640, TimeUnit.SECOND)),
    ],
)
def test_time_strings_parse(text: str, expected: Time[Any]) -> None:
    assert expected == Time.from_timestring(text)
    assert expected.unit is Time.from_timestring(text).unit


@given(value=whole, unit=st.sampled_from(UNITS))
def test_a_time_survives_its_own_string_and_repr(value: int, unit: TimeUnit) -> None:
    time = Time(value, unit)

    assert time == Time.from_timestring(str(time))
    assert time == eval(repr(time))  # noqa: S307 - the documented promise of repr
    assert time == pickle.loads(pickle.dumps(time))
    assert hash(time) == hash(copy.copy(time))


@pytest.mark.parametrize("number", [np.int32(2**31 - 1), np.uint8(255), np.array(7), torch.tensor(7)])
def test_an_integer_of_any_library_becomes_a_plain_one(number: Any) -> None:
    for time in (Time(number, "ba"), Time.from_input(number, "ba"), Time.from_batch(number), 0 + Time(number, "ba")):
        assert time == Time(int(number), "ba")
        assert type(time.value) is int
    assert (Time(number, "ba") * 2).value == 2 * int(number)  # NumPy's would have overflowed
    assert type(Timestamp(batch=number).state_dict()["batch"]) is int


@pytest.mark.parametrize("number", [True, np.True_, 2.0, np.float64(2), torch.tensor(2.0), torch.tensor(True), None])
def test_what_is_no_integer_never_becomes_one(number: Any) -> None:
    with pytest.raises(TypeError, match="`value` must be an int for the unit 'ba'"):
        Time(number, "ba")


def test_times_compute_with_numbers_of_numpy() -> None:
    time = Time(6, "ba")

    assert time == np.int64(6) == time
    assert time < np.int32(7)
    assert np.int64(5) < time
    for result in (time + np.int64(2), np.int64(2) + time, time * np.float64(4 / 3), np.int64(14) - time):
        assert result == Time(8, "ba")
        assert type(result.value) is int
    assert type(Time(np.float32(0.5), "dur").value) is float


@pytest.mark.parametrize("text", ["1.5ep", "0.1sec", "2.5ba"])
def test_fractions_are_refused_for_integer_units(text: str) -> None:
    with pytest.raises(TypeError, match=r"must be an int for the unit .*Only 'dur' takes fractions"):
        Time.from_timestring(text)


@pytest.mark.parametrize("text", ["", "ep", "10", "1foo", "1h2x", "nanep", "1__0ep", "ep10", "- 1ep"])
def test_other_text_is_refused_with_the_forms_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as '10ep' or '0.5dur'"):
        Time.from_timestring(text)


@pytest.mark.parametrize("text", ["24h", "60m", "61s"])
def test_wall_clock_times_have_limits(text: str) -> None:
    with pytest.raises(ValueError, match=r"at most 23 hours, 59 minutes and 59 seconds"):
        Time.from_timestring(text)
    with pytest.raises(ValueError, match=r"must look like '1h20m40s'"):
        Time.from_timedelta("tomorrow")


def test_numbers_need_a_unit() -> None:
    assert Time(3, "ep") == ensure_time(3, "ep")
    assert Time(3, "ba") == ensure_time("3ba", "ep")
    with pytest.raises(RuntimeError, match=r"must have a unit, got the plain number 3"):
        Time.from_input(3)
    with pytest.raises(RuntimeError, match=r"must be a `Time`, a string"):
        Time.from_input(None, "ep")  # type: ignore[arg-type]


def test_named_constructors_give_their_unit() -> None:
    assert [
        make(1).unit
        for make in (Time.from_iteration, Time.from_epoch, Time.from_batch, Time.from_sample, Time.from_token)
    ] == [TimeUnit.ITERATION, TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN]
    assert Time.from_duration(0.5) == "0.5dur"


@given(a=whole, b=whole, unit=st.sampled_from(UNITS))
def test_comparison_is_that_of_the_numbers(a: int, b: int, unit: TimeUnit) -> None:
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        expected = compare(a, b)
        assert expected == compare(Time(a, unit), Time(b, unit))
        assert expected == compare(Time(a, unit), b)
        assert expected == compare(Time(a, unit), f"{b}{unit.value}")


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
def test_different_units_do_not_compare(compare: Any) -> None:
    with pytest.raises(RuntimeError, match=r"different units"):
        compare(Time(1, "ep"), Time(1, "ba"))


@given(a=whole, b=st.integers(min_value=1, max_value=2**40), unit=st.sampled_from(UNITS))
def test_arithmetic_is_that_of_the_numbers(a: int, b: int, unit: TimeUnit) -> None:
    time, other = Time(a, unit), Time(b, unit)

    assert Time(a + b, unit) == time + other == other + a == str(other) + time
    assert Time(a - b, unit) == time - other == a - other
    assert Time(a % b, unit) == time % other
    assert Time(-a, unit) == -time
    assert time == +time
    assert a == int(time)
    assert float(a) == float(time)


def test_division_and_multiplication() -> None:
    assert Time(2, "ep") == Time(5, "ep") / 2
    assert Time(2.5, "dur") == Time(5, "ep") / Time(2, "ep")
    assert Time(2.5, "dur") == "5ep" / Time(2, "ep")
    assert Time(7, "ep") == Time(10, "ep") * 0.75 == 0.75 * Time(10, "ep")
    assert Time(5, "ep") == Time(10, "ep") * Time(0.5, "dur") == Time(0.5, "dur") * Time(10, "ep")
    assert Time(0.25, "dur") == Time(0.5, "dur") * Time(0.5, "dur")
    with pytest.raises(RuntimeError, match=r"must be a duration"):
        Time(1, "ep") * Time(1, "ep")
    with pytest.raises(RuntimeError, match=r"different units"):
        Time(1, "ep") / Time(1, "ba")


def test_a_timestamp_counts_batches_epochs_and_iterations() -> None:
    second = datetime.timedelta(seconds=1)
    first = Timestamp().to_next_batch(samples=8, tokens=32, duration=second).to_next_batch(8, 32, second)

    assert (first.batch, first.sample, first.token, first.epoch) == ("2ba", "16sp", "64tok", "0ep")
    assert (first.batch_in_epoch, first.sample_in_epoch, first.token_in_epoch) == ("2ba", "16sp", "64tok")
    assert (2 * second, 2 * second, second) == (first.total_wct, first.epoch_wct, first.batch_wct)

    epoch = first.to_next_epoch()
    assert (epoch.epoch, epoch.epoch_in_iteration, epoch.batch, epoch.batch_in_epoch) == ("1ep", "1ep", "2ba", "0ba")
    assert (2 * second, datetime.timedelta()) == (epoch.total_wct, epoch.epoch_wct)

    iteration = epoch.to_next_iteration()
    assert (
        iteration.iteration,
        iteration.epoch,
        iteration.epoch_in_iteration,
        iteration.token_in_iteration,
    ) == ("1iter", "1ep", "0ep", "0tok")


def test_a_timestamp_does_not_change() -> None:
    before = Timestamp(batch=3)
    before.to_next_batch(), before.to_next_epoch(), before.to_next_iteration()

    assert Timestamp(batch=3) == before


def test_a_timestamp_compares_by_the_unit_of_the_other_side() -> None:
    stamp = Timestamp(epoch=2, batch=30, total_wct=datetime.timedelta(seconds=61.5))

    assert stamp == "2ep"
    assert stamp > "29ba"
    assert stamp <= Time(30, "ba")
    assert stamp >= "1m1s"
    assert stamp.get("sec") == "61sec"
    assert stamp != Timestamp(epoch=2)
    with pytest.raises(TypeError):
        assert stamp < Timestamp()  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"must not be 'dur'"):
        stamp.get("dur")


def test_a_timestamp_survives_repr_copy_and_state_dict() -> None:
    stamp = Timestamp(
        iteration=1, epoch=2, batch=Time(3, "ba"), token=4, total_wct=datetime.timedelta(seconds=5)
    ).to_next_batch(7)
    restored = Timestamp()
    restored.load_state_dict(stamp.state_dict())

    assert stamp == eval(repr(stamp))  # noqa: S307 - the documented promise of repr
    assert stamp == restored == stamp.copy() == copy.deepcopy(stamp) == pickle.loads(pickle.dumps(stamp))
    assert stamp.copy(epoch=9).epoch == "9ep"
    assert all(type(v) in (int, float) for v in stamp.state_dict().values())


def test_older_saved_timestamps_load() -> None:
    stamp = Timestamp(epoch=1)
    stamp.load_state_dict({"epoch": 4, "batch": 9, "sample": 0, "token": 0})

    assert Timestamp(epoch=4, batch=9) == stamp


def test_counters_refuse_times_of_another_unit() -> None:
    with pytest.raises(ValueError, match=r"`batch` must be counted in 'ba'"):
        Timestamp(batch=Time(1, "ep"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1e999dur"])
def test_a_duration_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`value` must be finite, got"):
        Time.from_input(value, "dur")


def test_the_argument_whose_time_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"`wait` must be a time, got 'soon'. A time string must be a number"):
        ensure_time("soon", "ep", argument="wait")


@pytest.mark.parametrize("span", [datetime.timedelta(days=999, microseconds=1), datetime.timedelta(microseconds=7)])
def test_saved_clocks_are_numbers_that_give_back_every_microsecond(span: datetime.timedelta) -> None:
    saved = Timestamp(total_wct=span).state_dict()
    restored, of_older_file = Timestamp(), Timestamp()
    restored.load_state_dict(saved)
    of_older_file.load_state_dict({**saved, "total_wct": span})

    assert saved["total_wct"] == span.total_seconds()
    assert restored.total_wct == of_older_file.total_wct == span


def test_plain_numbers_are_those_of_the_counters_and_clocks() -> None:
    timestamp = Timestamp(batch=3, sample_in_epoch=5, total_wct=datetime.timedelta(seconds=1.5))

    assert (timestamp.batches, timestamp.samples_in_epoch, timestamp.total_seconds) == (3, 5, 1.5)
    assert all(type(timestamp.count(unit)) is int for unit in TimeUnit if unit is not TimeUnit.DURATION)


def test_programs_may_set_the_private_counters_as_times() -> None:
    timestamp = Timestamp(batch=3)
    timestamp._batch = Time(5, TimeUnit.BATCH)
    timestamp._epoch_in_iteration = 2
    timestamp._total_wct = datetime.timedelta(seconds=2)

    assert timestamp._batch == timestamp.batch == "5ba"
    assert timestamp.epoch_in_iteration == "2ep"
    assert timestamp.total_wct == datetime.timedelta(seconds=2)
    with pytest.raises(ValueError, match="must be counted in 'ep'"):
        timestamp._epoch = Time(5, TimeUnit.BATCH)
