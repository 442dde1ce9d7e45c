from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import cos, pi
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from composer.core import State, Time, Timestamp
from composer.optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
)
from composer.optim.scheduler import Schedule

StateOf = Callable[..., State]
Move = Callable[[State, str], None]

# 1000 epochs of 1000 batches, before the ratio: a schedule, the ratio, and factors at times.
TABLE: list[tuple[ComposerScheduler, float, Mapping[str, float]]] = [
    (
        WarmupStableDecayScheduler("100ep"),
        1.0,
        {"50ep": 0.5, "100ep": 1, "900ep": 1, "925ep": 0.5, "964ep": 0.2, "1000ep": 0},
    ),
    (
        WarmupStableDecayScheduler("0ep", "200ep", "linear", alpha_f=0.5),
        1.0,
        {"0ep": 1, "800ep": 1, "900ep": 0.75, "1000ep": 0.5},
    ),
    (WarmupStableDecayScheduler("100ep", "0.2dur", "cosine"), 0.5, {"100ep": 1, "400ep": 1, "450ep": 0.5, "500ep": 0}),
    (  # down to the floor of 0.2 by a power, then linear to 0
        WarmupStableDecayScheduler("100ep", "500ep", 0.5, alpha_f=0.2, t_linear="100ep"),
        1.0,
        {"50ep": 0.5, "400ep": 1, "525ep": 0.2 + 0.8 * (1 - 0.25**0.5), "900ep": 0.2, "950ep": 0.1, "1000ep": 0},
    ),
    (
        WarmupStableDecayScheduler("0ep", "0.5dur", 2.0, alpha_f=0.2, t_linear="0.1dur"),
        0.5,
        {"200ep": 1, "325ep": 0.8, "450ep": 0.2, "475ep": 0.1, "500ep": 0},
    ),
    (WarmupStableDecayScheduler("0ep", "1dur", 0.4, alpha_f=0.2), 1.0, {"0ep": 1, "500ep": 1 - 0.8 * 0.5**0.4}),
    (PolynomialScheduler(1.2, t_max="1.25dur"), 1.0, {"0ba": 1, "500ep": 0.6**1.2, "1000ep": 0.2**1.2}),
    (PolynomialWithWarmupScheduler("10ep", 1.2, t_max="1010ep"), 1.0, {"510ep": 0.5**1.2, "1000ep": 0.01**1.2}),
    (StepScheduler("10ba"), 1.0, {"0ba": 1, "9ba": 1, "10ba": 0.1, "35ba": 0.001}),
    (StepScheduler("0.002dur", gamma=0.8), 1.0, {"1999ba": 1, "2000ba": 0.8, "7000ba": 0.512}),
    (StepScheduler("1ep", gamma=0.5), 1.0, {"999ba": 1, "1000ba": 0.5, "3500ba": 0.125}),
    (StepScheduler("10ba", gamma=0.5), 0.5, {"4ba": 1, "5ba": 0.5, "18ba": 0.125}),
    (StepScheduler("0.002dur", gamma=0.8), 0.5, {"999ba": 1, "1000ba": 0.8, "3500ba": 0.512}),
    (StepScheduler("40sp"), 1.0, {"9ba": 1, "10ba": 0.1}),
    (StepScheduler("1000tok"), 2.0, {"19ba": 1, "20ba": 0.1}),
    (MultiStepScheduler(["10ba", "30ba", "70ba"]), 1.0, {"9ba": 1, "10ba": 0.1, "69ba": 0.01, "70ba": 0.001}),
    (MultiStepScheduler(["10ba", "30ba"], gamma=0.5), 1.0, {"9ba": 1, "10ba": 0.5, "30ba": 0.25}),
    (MultiStepScheduler(["1ep", "0.003dur", "20000sp"]), 1.0, {"999ba": 1, "1ep": 0.1, "3ep": 0.01, "5ep": 0.001}),
    (MultiStepScheduler(["100ba", "1ep"]), 0.25, {"24ba": 1, "25ba": 0.1, "249ba": 0.1, "250ba": 0.01}),
    (MultiStepScheduler([]), 1.0, {"0ba": 1, "1000ep": 1}),
    (ConstantScheduler(), 1.0, {"0ba": 1, "1000ep": 1}),
    (ConstantScheduler(alpha=2.0, t_max="500ep"), 1.0, {"0ba": 2, "499ep": 2, "500ep": 1, "501ep": 1}),
    (ConstantScheduler(alpha=2.0, t_max="500ep"), 0.5, {"249ep": 2, "250ep": 1}),
    (ConstantScheduler(alpha=0.5, t_max="0.5dur"), 0.5, {"249ep": 0.5, "250ep": 1}),
    (LinearScheduler(), 1.0, {"0ba": 1, "100ep": 0.9, "500500ba": 0.4995, "1000ep": 0}),
    (LinearScheduler(alpha_i=2.0, alpha_f=0.5), 1.0, {"0ba": 2, "500ep": 1.25, "1000ep": 0.5, "1200ep": 0.5}),
    (LinearScheduler(t_max="1000ep"), 0.5, {"0ba": 1, "100ep": 0.8, "500ep": 0}),
    (LinearScheduler(t_max="2000ep"), 1.0, {"500ep": 0.75, "1000ep": 0.5}),
    (LinearScheduler(t_max="4000000sp"), 1.0, {"250ep": 0.75}),
    (ExponentialScheduler(gamma=0.5), 1.0, {"0ba": 1, "500ba": 0.5**0.5, "3ep": 0.125}),
    (ExponentialScheduler(gamma=0.5, decay_period="20ba"), 0.5, {"10ba": 0.5, "15ba": 0.5**1.5}),
    (ExponentialScheduler(gamma=0.0, decay_period="20ba"), 1.0, {"0ba": 1, "1ba": 0}),
    (CosineAnnealingScheduler(), 1.0, {"0ba": 1, "250ep": (1 + 0.5**0.5) / 2, "500ep": 0.5, "1000ep": 0}),
    (CosineAnnealingScheduler(alpha_f=0.2), 1.0, {"0ba": 1, "500ep": 0.6, "1000ep": 0.2, "1500ep": 0.2}),
    (CosineAnnealingScheduler(t_max="1000ep"), 0.5, {"250ep": 0.5, "500ep": 0}),
    (CosineAnnealingWarmRestartsScheduler("10ba"), 1.0, {"0ba": 1, "5ba": 0.5, "10ba": 1, "25ba": 0.5, "1000ep": 1}),
    (
        CosineAnnealingWarmRestartsScheduler("10ba", t_mult=2.0, alpha_f=0.5),
        1.0,
        {"0ba": 1, "5ba": 0.75, "10ba": 1, "20ba": 0.75, "30ba": 1, "50ba": 0.75, "70ba": 1},
    ),
    (CosineAnnealingWarmRestartsScheduler("3ba", t_mult=1.5), 1.0, {"3ba": 1, "5ba": 0.5, "7ba": 1, "10ba": 0.5}),
    (CosineAnnealingWarmRestartsScheduler("8ba", t_mult=0.5), 1.0, {"8ba": 1, "10ba": 0.5, "12ba": 1, "14ba": 1}),
    (CosineAnnealingWarmRestartsScheduler("1ep"), 0.5, {"250ba": 0.5, "500ba": 1}),
    (PolynomialScheduler(power=2), 1.0, {"0ba": 1, "500ep": 0.25, "1000ep": 0}),
    (PolynomialScheduler(power=0.5, alpha_f=0.1), 1.0, {"0ba": 1, "750ep": 0.55, "1000ep": 0.1, "1100ep": 0.1}),
    (PolynomialScheduler(power=2, t_max="1000ep"), 0.5, {"250ep": 0.25}),
    (MultiStepWithWarmupScheduler("10ba", ["20ba"]), 1.0, {"0ba": 0, "5ba": 0.5, "10ba": 1, "20ba": 0.1}),
    (MultiStepWithWarmupScheduler("10ba", ["4ba"]), 1.0, {"5ba": 0.5, "10ba": 0.1}),
    (MultiStepWithWarmupScheduler("10ba", ["40ba"]), 0.5, {"5ba": 0.5, "10ba": 1, "19ba": 1, "20ba": 0.1}),
    (
        MultiStepWithWarmupScheduler("10ba", ["40ba"], scale_warmup=True),
        0.5,
        {"0ba": 0, "1ba": 0.2, "5ba": 1, "9ba": 1, "19ba": 1, "20ba": 0.1},
    ),
    (ConstantWithWarmupScheduler("500ep"), 1.0, {"0ba": 0, "250ep": 0.5, "500ep": 1, "1000ep": 1}),
    (ConstantWithWarmupScheduler("0.1dur", alpha=3.0), 1.0, {"50ep": 1.5, "100ep": 3, "999ep": 3}),
    (ConstantWithWarmupScheduler("100ep", scale_warmup=True), 0.5, {"25ep": 0.5, "50ep": 1, "75ep": 1}),
    (LinearWithWarmupScheduler("500ep"), 1.0, {"0ba": 0, "250ep": 0.5, "500ep": 1, "750ep": 0.5, "1000ep": 0}),
    (
        LinearWithWarmupScheduler("500ep", alpha_i=3.0, alpha_f=2.0, t_max="1002ep"),
        1.0,
        {"250ep": 1.5, "500ep": 3, "751ep": 2.5},
    ),
    (LinearWithWarmupScheduler("100ep"), 0.5, {"50ep": 0.5, "100ep": 1, "300ep": 0.5, "500ep": 0}),
    (LinearWithWarmupScheduler("1000ep", alpha_i=2.0), 1.0, {"500ep": 1, "1000ep": 2, "1001ep": 2}),
    (LinearWithWarmupScheduler("0.5dur", scale_warmup=True), 0.5, {"125ep": 0.5, "250ep": 1, "375ep": 0.5}),
    (LinearWithWarmupScheduler("4000sp", t_max="4000000sp"), 1.0, {"500ba": 0.5, "1000ba": 1}),
    (CosineAnnealingWithWarmupScheduler("500ep"), 1.0, {"250ep": 0.5, "500ep": 1, "750ep": 0.5, "1000ep": 0}),
    (CosineAnnealingWithWarmupScheduler("200ep", alpha_f=0.5), 1.0, {"100ep": 0.5, "600ep": 0.75, "1000ep": 0.5}),
    (
        CosineAnnealingWithWarmupScheduler("100ep", t_max="1000ep", scale_warmup=True),
        0.5,
        {"25ep": 0.5, "50ep": 1, "99ep": 1, "100ep": 1, "300ep": 0.5, "500ep": 0},
    ),
    (PolynomialWithWarmupScheduler("500ep"), 1.0, {"250ep": 0.5, "500ep": 1, "750ep": 0.25, "1000ep": 0}),
    (PolynomialWithWarmupScheduler("200ep", power=1, alpha_f=0.5), 1.0, {"100ep": 0.5, "600ep": 0.75, "1000ep": 0.5}),
]

# One of each of the schedules that keep their last factor after `t_max`.
FLATTENING: list[Callable[[str, float], ComposerScheduler]] = [
    lambda t_max, alpha_f: LinearScheduler(alpha_f=alpha_f, t_max=t_max),
    CosineAnnealingScheduler,
    lambda t_max, alpha_f: PolynomialScheduler(2.0, t_max, alpha_f),
]
# One of each of the schedules with a `t_max` that has to cover the run.
COVERING: list[Callable[[str], ComposerScheduler]] = [
    lambda t_max: ConstantWithWarmupScheduler("1ba", t_max=t_max),
    lambda t_max: LinearWithWarmupScheduler("1ba", t_max=t_max),
    lambda t_max: CosineAnnealingWithWarmupScheduler("1ba", t_max),
    lambda t_max: PolynomialWithWarmupScheduler("1ba", t_max=t_max),
]
WARMING: list[Callable[[str], ComposerScheduler]] = [
    lambda t_warmup: MultiStepWithWarmupScheduler(t_warmup, ["500ep"]),
    ConstantWithWarmupScheduler,
    LinearWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
]


@pytest.mark.parametrize(("scheduler", "ssr", "factors"), TABLE, ids=lambda value: str(value)[:80])
def test_the_factor_is_that_of_the_formula(
    scheduler: ComposerScheduler, ssr: float, factors: Mapping[str, float], state_of: StateOf, move: Move
) -> None:
    state = state_of(f"{int(1000 * ssr)}ep")
    actual = {}
    for time in factors:
        move(state, time)
        actual[time] = scheduler(state, ssr)

    assert factors == pytest.approx(actual, abs=1e-9)


@pytest.mark.parametrize(("scheduler", "ssr", "factors"), TABLE, ids=lambda value: str(value)[:80])
def test_a_bound_schedule_follows_the_time(
    scheduler: Schedule, ssr: float, factors: Mapping[str, float], state_of: StateOf, move: Move
) -> None:
    state = state_of(f"{int(1000 * ssr)}ep")
    factor = scheduler.bind(state, ssr)
    bound, called = [], []
    for time in factors:
        move(state, time)
        bound.append(factor())
        called.append(scheduler(state, ssr))

    assert called == bound
    assert {float} == {type(value) for value in bound}


def test_a_class_can_be_asked_whether_it_is_a_schedule() -> None:
    class Own(ComposerScheduler):
        def __call__(self, state: State, ssr: float = 1.0) -> float:
            return 1.0

    assert issubclass(Own, ComposerScheduler)
    assert issubclass(CosineAnnealingScheduler, ComposerScheduler)
    assert isinstance(Own(), ComposerScheduler)
    assert not isinstance(0.1, ComposerScheduler)


@pytest.mark.parametrize("make", FLATTENING)
@pytest.mark.parametrize("t_max", ["2000ba", "2ep", "0.002dur"])
def test_the_last_factor_is_kept_after_t_max(
    make: Callable[[str, float], ComposerScheduler], t_max: str, state_of: StateOf, move: Move
) -> None:
    state = state_of()
    scheduler = make(t_max, 0.25)
    factors = []
    for time in ("2000ba", "2001ba", "900ep"):
        move(state, time)
        factors.append(scheduler(state))

    assert factors == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("make", COVERING)
@pytest.mark.parametrize("t_max", ["999999ba", "999ep", "0.5dur"])
def test_a_t_max_shorter_than_the_run_is_refused_with_advice(
    make: Callable[[str], ComposerScheduler], t_max: str, state_of: StateOf
) -> None:
    with pytest.raises(ValueError, match=r"must be greater than or equal to max_duration.*a function of your own"):
        make(t_max)(state_of())


@pytest.mark.parametrize("make", COVERING)
@pytest.mark.parametrize("t_max", ["1000000ba", "1000ep", "1dur", "1500ep"])
def test_a_t_max_that_covers_the_run_is_accepted(
    make: Callable[[str], ComposerScheduler], t_max: str, state_of: StateOf
) -> None:
    assert 0 <= make(t_max)(state_of()) <= 1


def test_a_run_in_batches_is_compared_with_a_t_max_in_epochs(state_of: StateOf) -> None:
    scheduler = ConstantWithWarmupScheduler("1ba", t_max="2ep")
    scheduler(state_of("2000ba"))

    with pytest.raises(ValueError, match=r"got '2000ba' in a run of '2001ba'"):
        scheduler(state_of("2001ba"))


def test_incomparable_units_are_logged_once(state_of: StateOf, move: Move, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of("100sp")
    scheduler = LinearWithWarmupScheduler("1ba", t_max="21ba")
    with caplog.at_level(logging.WARNING):
        factors = [scheduler(state)]
        move(state, "11ba")
        factors.append(scheduler(state))

    assert factors == [0.0, 0.5]
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot compare `t_max` (21ba) with the length of the run (100sp): the schedule may end before the run."
    ]


def test_schedules_of_other_projects_find_the_checks_that_they_import(state_of: StateOf) -> None:
    from composer.optim.scheduler import _raise_if_max_duration_exceeds_t_max, _raise_if_warmup_and_max_incompatible

    _raise_if_max_duration_exceeds_t_max(Time.from_input("100ba"), state_of("100ba"))
    _raise_if_warmup_and_max_incompatible(Time.from_input("10ba"), Time.from_input("100ba"))

    with pytest.raises(ValueError, match="must be greater than or equal to max_duration, got '99ba'"):
        _raise_if_max_duration_exceeds_t_max(Time.from_input("99ba"), state_of("100ba"))
    with pytest.raises(ValueError, match="must convert to the same unit, got '10sp' and '100ba'"):
        _raise_if_warmup_and_max_incompatible(Time.from_input("10sp"), Time.from_input("100ba"))


def test_without_a_max_duration_any_t_max_is_accepted(state_of: StateOf, move: Move) -> None:
    state = state_of(None)
    move(state, "5ba")

    assert LinearScheduler(t_max="20ba")(state) == 0.75


@pytest.mark.parametrize("make", WARMING)
def test_a_warmup_of_nothing_warns(make: Callable[[str], ComposerScheduler], state_of: StateOf) -> None:
    with pytest.warns(UserWarning, match="`t_warmup` is rounded to '0ba', so there is no warmup") as caught:
        factor = make("0.0001dur")(state_of("100ba"))

    assert factor == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        *((make("50ba"), "`t_warmup`") for make in WARMING),
        (WarmupStableDecayScheduler("6ba", "8ba"), "`t_warmup` and .*"),
    ],
    ids=str,
)
def test_a_warmup_longer_than_the_run_is_warned_of(
    schedule: ComposerScheduler, names: str, state_of: StateOf, move: Move
) -> None:
    state = state_of("10ba")
    move(state, "5ba")
    message = (
        rf"{names} should not be longer than the run, got '(50|14)ba' in a run of '10ba': the full learning rate is"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        factor = schedule(state)

    assert factor == pytest.approx(5 / 50 if names == "`t_warmup`" else 5 / 6 * (1 - math.sqrt(3 / 8)))
    assert [__file__] == [each.filename for each in caught]


@pytest.mark.parametrize("make", [*WARMING[1:], WarmupStableDecayScheduler])
def test_a_warmup_longer_than_a_given_t_max_is_refused(
    make: Callable[..., ComposerScheduler], state_of: StateOf
) -> None:
    with pytest.raises(ValueError, match="`t_warmup` must not be longer than `t_max`, got '50ba' and an end at '20ba'"):
        make("50ba", t_max="20ba")(state_of("10ba"))
    make("15ba", t_max="20ba")(state_of("10ba"))  # the first part of a longer run


@pytest.mark.parametrize("t_warmup", ["0ba", "0dur"])
@pytest.mark.parametrize("make", WARMING)
def test_a_warmup_of_exactly_zero_is_accepted(
    make: Callable[[str], ComposerScheduler], t_warmup: str, state_of: StateOf
) -> None:
    assert make(t_warmup)(state_of()) == 1


@pytest.mark.parametrize("make", WARMING[1:])
def test_warmup_and_t_max_must_convert_to_one_unit(make: Callable[[str], ComposerScheduler], state_of: StateOf) -> None:
    with pytest.raises(ValueError, match=r"Cannot use warmup scheduler: .* must convert to the same unit, got '10sp'"):
        make("10sp")(state_of())


def test_milestones_increase() -> None:
    message = "`milestones` must be in increasing order, got '60ep' before '30ep'"
    for make in (MultiStepScheduler, lambda milestones: MultiStepWithWarmupScheduler("1ep", milestones)):
        with pytest.raises(ValueError, match=message):
            make(["60ep", "30ep"])
        make(["30ep", "30ep", "5ba", "40ep"])


def test_milestones_may_be_in_other_units_than_the_warmup(state_of: StateOf, move: Move) -> None:
    state = state_of()
    move(state, "20ba")

    assert MultiStepWithWarmupScheduler("10sp", ["15ba", "2000tok"], gamma=0.5)(state) == 0.25


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (StepScheduler("1ba"), "`step_size` must be at least one batch, got .*which is rounded to 0"),
        (ExponentialScheduler(0.5, "1ba"), "`decay_period` must be at least one batch"),
        (CosineAnnealingWarmRestartsScheduler("1ba"), "`t_0` must be at least one batch"),
    ],
)
def test_a_period_that_the_ratio_rounds_to_zero_is_refused(
    scheduler: ComposerScheduler, message: str, state_of: StateOf
) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(state_of(), 0.5)


def test_a_cycle_that_shrinks_to_nothing_is_refused_when_it_is_reached(state_of: StateOf, move: Move) -> None:
    state = state_of()
    scheduler = CosineAnnealingWarmRestartsScheduler("2ba", t_mult=0.5)
    move(state, "2ba")

    assert scheduler(state) == 1
    move(state, "3ba")
    with pytest.raises(ValueError, match=r"`t_mult \* length` must be at least one batch"):
        scheduler(state)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: StepScheduler(10), TypeError, r"`step_size` must be a `Time` or a time string, got 10\."),  # type: ignore[arg-type]
        (lambda: LinearScheduler(t_max="soon"), ValueError, "A time string must be"),
        (lambda: MultiStepScheduler("10ba"), TypeError, "`milestones` must be a sequence of times, got '10ba'"),
        (lambda: MultiStepWithWarmupScheduler("1ba", Time(1, "ba")), TypeError, "`milestones` must be a sequence"),  # type: ignore[arg-type]
        (lambda: ExponentialScheduler(-0.5), ValueError, "`gamma` must not be negative, got -0.5"),
    ],
)
def test_arguments_are_checked_at_construction(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_times_may_be_time_objects(state_of: StateOf, move: Move) -> None:
    state = state_of()
    move(state, "10ba")

    assert MultiStepWithWarmupScheduler(Time(5, "ba"), [Time(10, "ba")])(state) == 0.1


def test_a_schedule_shows_its_arguments() -> None:
    expected = "PolynomialWithWarmupScheduler(t_warmup=Time(3, TimeUnit.EPOCH), power=2.0, "
    expected += "t_max=Time(1.0, TimeUnit.DURATION), alpha_f=0.1, scale_warmup=False)"

    assert expected == repr(PolynomialWithWarmupScheduler("3ep", alpha_f=0.1))


times = st.integers(min_value=0, max_value=4000)
ratios = st.floats(min_value=0.05, max_value=4.0)
finals = st.floats(min_value=0.0, max_value=1.0)


def _values(scheduler: ComposerScheduler, state: State, ssr: float, moments: list[int]) -> list[float]:
    factors = []
    for batch in sorted(moments):
        state.timestamp = Timestamp(batch=batch)
        factors.append(scheduler(state, ssr))
    return factors


@given(alpha_f=finals, ssr=ratios, moments=st.lists(times, min_size=2, max_size=8))
def test_without_warmup_the_covering_schedules_fall_from_1_to_alpha_f(
    alpha_f: float, ssr: float, moments: list[int], state_of: StateOf
) -> None:
    state = state_of(f"{int(1000 * ssr)}ba")
    for scheduler in (
        LinearScheduler(alpha_f=alpha_f, t_max="1000ba"),
        CosineAnnealingScheduler("1000ba", alpha_f),
        PolynomialScheduler(3.0, "1000ba", alpha_f),
    ):
        factors = _values(scheduler, state, ssr, [0, *moments, 10_000])

        assert factors[0] == pytest.approx(1.0)
        assert factors[-1] == pytest.approx(alpha_f)
        assert all(a >= b - 1e-12 for a, b in pairwise(factors))


@given(warmup=st.integers(1, 900), ssr=ratios, scale=st.booleans(), moments=st.lists(times, min_size=2, max_size=8))
def test_a_warmup_never_falls_and_never_leaves_0_to_1(
    warmup: int, ssr: float, scale: bool, moments: list[int], state_of: StateOf
) -> None:
    assume(0 < (int(warmup * ssr) if scale else warmup) <= int(1000 * ssr))
    state = state_of(f"{int(1000 * ssr)}ba")
    for scheduler in (
        ConstantWithWarmupScheduler(f"{warmup}ba", scale_warmup=scale),
        LinearWithWarmupScheduler(f"{warmup}ba", scale_warmup=scale),
        CosineAnnealingWithWarmupScheduler(f"{warmup}ba", scale_warmup=scale),
        PolynomialWithWarmupScheduler(f"{warmup}ba", scale_warmup=scale),
        MultiStepWithWarmupScheduler(f"{warmup}ba", ["5000ba"], scale_warmup=scale),
    ):
        factors = _values(scheduler, state, ssr, [0, *(m % warmup for m in moments)])

        assert factors[0] == 0
        assert all(a <= b + 1e-12 for a, b in pairwise(factors))
        assert max(factors) <= 1


@given(t_0=st.integers(1, 50), t_mult=st.floats(1.0, 3.0), alpha_f=finals, batch=st.integers(0, 3000))
def test_warm_restarts_agree_with_counting_the_cycles(
    t_0: int, t_mult: float, alpha_f: float, batch: int, state_of: StateOf
) -> None:
    begin, length = 0, t_0
    while begin + length <= batch:
        begin, length = begin + length, int(t_mult * length)
    expected = alpha_f + (1 - alpha_f) * 0.5 * (1 + cos(pi * (batch - begin) / length))

    state = state_of()
    state.timestamp = Timestamp(batch=batch)

    assert expected == pytest.approx(CosineAnnealingWarmRestartsScheduler(f"{t_0}ba", t_mult, alpha_f)(state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"t_decay": "0ba"}, "`t_decay` must be positive"),
        ({"decay": "sqrt"}, "`decay` must be one of '1-sqrt', 'linear', 'cosine' or a number, got 'sqrt'"),
        ({"decay": 0.0}, "`decay` must be .*positive"),
        ({"t_linear": "0ba"}, "`t_linear` must be positive"),
        ({"alpha_f": -1.0}, "`alpha_f` must not be negative"),
    ],
)
def test_a_stable_schedule_with_wrong_arguments_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmupStableDecayScheduler("1ba", **arguments)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            WarmupStableDecayScheduler("600ep", "500ep", t_max="1000ep"),
            "`t_warmup` and `t_decay` together must not be longer than `t_max`, got '1100000ba' and",
        ),
        (
            WarmupStableDecayScheduler("300ep", "500ep", t_linear="300ep", t_max="1000ep"),
            "`t_warmup` and `t_decay` and `t_linear` together must not be longer than `t_max`, got '1100000ba' and",
        ),
        (WarmupStableDecayScheduler("1ep", "500sp"), "`t_decay` and `t_max` must convert to the same unit"),
        (WarmupStableDecayScheduler("1ep", t_linear="5sp"), "`t_linear` and `t_max` must convert to the same unit"),
        (WarmupStableDecayScheduler("1ba", t_max="10ba"), "must be greater than or equal to max_duration"),
    ],
)
def test_a_stable_schedule_that_does_not_fit_the_run_is_refused(
    state_of: StateOf, schedule: WarmupStableDecayScheduler, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(state_of())
