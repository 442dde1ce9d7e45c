"""The statistics on simulated ledgers whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tiny_tasks import tiny

from composer.evidence import RunSpec, steptime
from composer.evidence.methods import Stack
from composer.evidence.statistics import ALPHA, Rung, at_equal_time, compare, holm, judge, time_to_target

CONTROLS, RUNS, METHODS = 20, 10, 8


def draw(rng: np.random.Generator, count: int, effect: float = 0.0, sd: float = 1.0) -> dict[int, float]:
    return dict(enumerate(rng.normal(effect, sd, count).tolist()))


def simulate(rng: np.random.Generator, effects: list[float]) -> tuple[list[str], bool]:
    """Return the verdicts of a ledger, and whether it would have a gain without the confirmation on fresh seeds."""
    names = [str(i) for i in range(len(effects))]
    methods = {name: draw(rng, RUNS, effect) for name, effect in zip(names, effects, strict=True)}
    screening = compare(draw(rng, CONTROLS), methods, higher_is_better=True)
    gains = [name for name in names if judge(screening[name]).word == "not judged"]
    fresh = {name: draw(rng, CONTROLS, effects[int(name)]) for name in gains}
    confirmed = compare(draw(rng, CONTROLS), fresh, higher_is_better=True) if gains else {}
    return [judge(screening[name], confirmed.get(name)).word for name in names], bool(gains)


def test_without_effects_at_most_five_percent_of_ledgers_have_a_false_verdict_and_gains_are_rarer() -> None:
    rng = np.random.default_rng(0)
    false, first, gains = 0, 0, 0
    for _ in range(1000):
        words, unconfirmed = simulate(rng, [0.0] * METHODS)
        false += any(word != "no effect found" for word in words)
        first += unconfirmed
        gains += "gain" in words

    assert false / 1000 <= ALPHA
    assert 0 < first / 1000 <= ALPHA  # before the confirmation
    assert gains / 1000 <= 0.005  # both on first and on fresh seeds


def test_averages_scored_in_runs_of_plain_have_no_more_false_verdicts() -> None:
    rng = np.random.default_rng(2)
    count = 0
    for _ in range(1000):
        control = draw(rng, CONTROLS)
        average = {seed: value + rng.normal(0, 0.1) for seed, value in control.items()}
        found = compare(control, {"EMA": average}, higher_is_better=False, same_runs=frozenset({"EMA"}))["EMA"]
        count += found.p_corrected < ALPHA

    # the rate is 0.05; three standard errors of 1,000 draws are 0.021
    assert count / 1000 == pytest.approx(ALPHA, abs=0.021)


def test_an_effect_of_the_smallest_visible_size_is_found_with_the_stated_power() -> None:
    rng = np.random.default_rng(3)
    error = math.sqrt(1 / RUNS + 1 / CONTROLS)
    freedom = RUNS + CONTROLS - 2
    effect = (stats.t.ppf(1 - ALPHA / METHODS / 2, freedom) + stats.t.ppf(0.8, freedom)) * error
    found = 0
    for _ in range(500):
        methods = {str(i): draw(rng, RUNS) for i in range(METHODS - 1)} | {"good": draw(rng, RUNS, effect)}
        found += compare(draw(rng, CONTROLS), methods, higher_is_better=True)["good"].p_corrected < ALPHA

    # three standard errors of 500 draws at 0.8 are 0.054; Welch's degrees of freedom cost 0.01
    assert 0.73 <= found / 500 <= 0.86


def test_large_effects_are_confirmed_as_gains_and_losses() -> None:
    rng = np.random.default_rng(4)
    words = [simulate(rng, [3.0, -3.0, *[0.0] * 6])[0][:2] for _ in range(50)]

    assert words.count(["gain", "loss"]) >= 48


def test_the_stated_smallest_visible_effect_is_that_of_the_formula() -> None:
    control = {i: float(i % 2) for i in range(20)}
    method = {i: float(i % 2) for i in range(10)}
    result = compare(control, {"a": method}, higher_is_better=True)["a"]
    error = math.sqrt(result.sd**2 / 10 + result.sd_control**2 / 20)
    freedom = stats.ttest_ind(list(method.values()), list(control.values()), equal_var=False).df
    expected = (stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error

    assert result.smallest_visible == pytest.approx(expected)


@given(st.integers(0, 10_000), st.sampled_from([True, False]), st.sampled_from(["welch", "paired"]))
def test_intervals_and_p_values_are_those_of_scipy(seed: int, higher: bool, test: str) -> None:
    rng = np.random.default_rng(seed)
    control = draw(rng, 12)
    method = draw(rng, 12 if test == "paired" else 7, 0.5, 2.0)
    result = compare(
        control, {"a": method}, higher_is_better=higher, same_runs=frozenset({"a"} if test == "paired" else ())
    )["a"]
    a, b = list(method.values()), list(control.values())
    if not higher:
        a, b = [-x for x in a], [-x for x in b]
    expected = stats.ttest_rel(a, b) if test == "paired" else stats.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval()

    assert test == result.test
    assert float(expected.pvalue) == pytest.approx(result.p)
    assert (interval.low, interval.high) == pytest.approx((result.low, result.high))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_the_step_down_procedure_rejects(values: list[float]) -> None:
    corrected = holm({str(i): p for i, p in enumerate(values)})
    rejected, order = set(), sorted(range(len(values)), key=lambda i: values[i])
    for rank, i in enumerate(order):
        if (len(values) - rank) * values[i] >= ALPHA:
            break
        rejected.add(str(i))

    assert rejected == {name for name, p in corrected.items() if p < ALPHA}
    assert all(corrected[str(i)] >= p for i, p in enumerate(values))


def test_a_gain_that_fresh_seeds_do_not_confirm_is_no_effect() -> None:
    rng = np.random.default_rng(0)
    good = compare(draw(rng, 20), {"a": draw(rng, 10, 5.0)}, higher_is_better=True)["a"]
    none = compare(draw(rng, 20), {"a": draw(rng, 10)}, higher_is_better=True)["a"]
    bad = compare(draw(rng, 20), {"a": draw(rng, 10, -5.0)}, higher_is_better=True)["a"]

    assert judge(good).word == "not judged"
    assert judge(good, good).word == "gain"
    assert judge(good, none).word == judge(good, bad).word == "no effect found"
    assert "not confirmed" in judge(good, none).why
    assert judge(bad).word == "loss"
    assert judge(none).why.startswith("smallest visible: ")


def test_the_direction_of_the_metric_decides_what_is_better() -> None:
    control, lower = {i: 1.0 + i / 100 for i in range(5)}, {i: 0.5 + i / 100 for i in range(5)}

    assert compare(control, {"a": lower}, higher_is_better=False)["a"].effect == pytest.approx(0.5)
    assert compare(control, {"a": lower}, higher_is_better=True)["a"].effect == pytest.approx(-0.5)


def test_constant_scores_are_compared_without_an_error() -> None:
    same = compare({0: 1.0, 1: 1.0}, {"a": {0: 1.0, 1: 1.0}}, higher_is_better=True)["a"]
    other = compare({0: 1.0, 1: 1.0}, {"a": {0: 2.0, 1: 2.0}}, higher_is_better=True)["a"]

    assert (same.p, other.p) == (1.0, 0.0)


def test_scores_that_are_not_finite_or_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="Two or more finite scores"):
        compare({0: 1.0, 1: 1.0}, {"a": {0: 1.0, 1: math.nan}}, higher_is_better=True)
    with pytest.raises(ValueError, match="Two or more finite scores"):
        compare({0: 1.0}, {"a": {0: 1.0, 1: 2.0}}, higher_is_better=True)
    with pytest.raises(ValueError, match="common seeds"):
        compare({0: 1.0, 1: 2.0}, {"a": {5: 1.0, 6: 2.0}}, higher_is_better=True, same_runs=frozenset({"a"}))


def ladder(*means: float, times: tuple[float, ...] = (0.25, 0.5, 1.0), sd: float = 0.0) -> list[Rung]:
    rng = np.random.default_rng(0)
    return [Rung(t, draw(rng, 10, mean, sd)) for t, mean in zip(times, means, strict=True)]


def test_at_equal_time_a_slower_method_meets_longer_plain_training() -> None:
    plain = ladder(1.0, 2.0, 3.0)
    method = dict.fromkeys(range(5), 2.6)

    effect, low, high, bound = at_equal_time(method, math.sqrt(0.5), plain, higher_is_better=True)
    assert effect == low == high == pytest.approx(0.1)
    assert not bound
    assert at_equal_time(method, 2.0, plain, higher_is_better=True)[3]
    assert at_equal_time(method, 0.1, plain, higher_is_better=True)[0] == pytest.approx(1.6)
    assert at_equal_time(method, 1.0, plain, higher_is_better=False)[0] == pytest.approx(0.4)


def test_the_time_to_a_target_counts_from_where_a_ladder_stays_above_it() -> None:
    plain = dict.fromkeys(range(10), 2.5)

    assert time_to_target(ladder(1, 2, 3), plain, higher_is_better=True).ratio == pytest.approx(0.5**0.5)
    dipped = time_to_target(ladder(3, 2, 3), plain, higher_is_better=True)
    assert dipped.ratio == pytest.approx(0.5**0.5)
    first = time_to_target(ladder(3, 3, 3), plain, higher_is_better=True)
    assert first.ratio == pytest.approx(0.25)
    assert first.at_most
    never = time_to_target(ladder(1, 2, 2), plain, higher_is_better=True)
    assert never.ratio is None
    assert never.high is None
    assert time_to_target(ladder(4, 3, 2), plain, higher_is_better=False).ratio == pytest.approx(0.5**0.5)


def test_the_interval_of_a_time_to_target_covers_that_of_the_step_time() -> None:
    rng = np.random.default_rng(3)
    rungs = [Rung(steps, draw(rng, 8, mean, 0.2)) for steps, mean in ((0.25, -1.5), (0.5, -0.5), (1.0, 0.6))]
    plain = draw(rng, 20, 0.0, 0.2)
    in_steps = time_to_target(rungs, plain, higher_is_better=True)
    in_time = in_steps.scaled(1.2, 1.1, 1.5)

    assert in_steps.low is not None
    assert in_steps.high is not None
    slower = time_to_target([Rung(1.2 * r.time, r.scores) for r in rungs], plain, higher_is_better=True)
    assert in_time.ratio == pytest.approx(slower.ratio)
    assert (in_time.low, in_time.high) == (pytest.approx(1.1 * in_steps.low), pytest.approx(1.5 * in_steps.high))
    assert in_time.low < slower.low < slower.high < in_time.high  # type: ignore[operator]
    never = time_to_target(rungs, dict.fromkeys(range(9), 5.0), higher_is_better=True).scaled(1.2, 1.1, 1.5)
    assert (never.ratio, never.low, never.high) == (None, None, None)


@pytest.mark.parametrize("seeds", [4, 5, 10])
def test_the_interval_of_the_time_to_a_target_covers_the_truth(seeds: int) -> None:
    rng = np.random.default_rng(6)
    inside = 0
    for _ in range(400):
        rungs = [Rung(t, draw(rng, seeds, math.log2(t), 0.3)) for t in (0.25, 0.5, 1.0, 2.0)]
        found = time_to_target(rungs, draw(rng, 20, 0.1, 0.3), higher_is_better=True)
        inside += (found.low or 0) <= 2**0.1 <= (math.inf if found.high is None else found.high)

    # 95 %; three standard errors of 400 draws are 3.3 %
    assert 0.917 <= inside / 400


def test_the_interval_at_equal_time_covers_the_truth() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(400):
        rungs = [Rung(t, draw(rng, 5, math.log2(t), 0.3)) for t in (0.25, 0.5, 1.0, 2.0)]
        _, low, high, _ = at_equal_time(draw(rng, 5, 1.0, 0.3), 2**0.3, rungs, higher_is_better=True)
        inside += low <= 0.7 <= high

    assert 0.917 <= inside / 400


def costs(*rounds: list[float]) -> list[steptime.StepTime]:
    """Return the costs of methods from the times of plain, of plain again, and of the methods in each round."""
    more = {"evaluation": [1.0, 1.0, 6.0, 1.5], "memory": [2, 2, 4, 6]}
    return steptime.step_times([steptime.Round(times, [2 * time for time in times], **more) for times in rounds])  # type: ignore[arg-type]


def test_the_interval_of_a_ratio_is_as_wide_as_the_ratio_of_plain_to_itself() -> None:
    found, second = costs([1.0, 1.0, 1.2, 2.4], [1.0, 1.05, 1.23, 2.46], [1.0, 0.98, 1.188, 2.376])

    assert found.ratio == pytest.approx(1.2)
    assert found.wall_ratio == pytest.approx(1.2)
    assert found.against_itself == (pytest.approx(0.98), pytest.approx(1.05))
    assert (found.low, found.high) == (pytest.approx(1.2 / 1.05), pytest.approx(1.2 * 1.05))
    assert (found.inference, found.memory) == (6.0, 2.0)
    assert found.rounds == [[1.0, 1.0, 1.2], [1.0, 1.05, 1.23], [1.0, 0.98, 1.188]]
    assert (second.ratio, second.inference, second.memory) == (pytest.approx(2.4), 1.5, 3.0)
    assert second.rounds[2] == [1.0, 0.98, 2.376]


def test_the_interval_of_a_ratio_is_as_wide_as_its_rounds() -> None:
    (found,) = costs([1.0, 1.0, 1.2], [2.0, 2.0, 2.2], [3.0, 3.0, 3.3])

    assert found.ratio == pytest.approx(1.1)
    assert (found.low, found.high) == (pytest.approx(1.1**2 / 1.2), pytest.approx(1.2))


def test_a_ratio_that_varies_too_much_is_not_measured() -> None:
    (found,) = costs([1.0, 1.0, 1.2], [1.0, 1.2, 1.2])

    assert found.ratio is None
    assert found.low < 1.1 < found.high


def test_what_acts_in_evaluations_alone_does_not_act_in_training() -> None:
    assert not steptime.acts_in_training([("TestTimeAugmentation", {})])
    for name in ("BlurPool", "LabelSmoothing", "EMA"):  # at the start, in each step, and after it
        assert steptime.acts_in_training([("TestTimeAugmentation", {}), (name, {})])


def test_a_network_that_is_evaluated_like_plains_takes_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(steptime, "_clocks", lambda device: (float(next(ticks) ** 2),) * 2)
    stacks: tuple[Stack, ...] = (
        *((), (), (("EMA", {}),), (("CautiousDecay", {}),)),
        (("GhostBatchNorm", {"ghost_batch_size": 4}),),
    )
    task, specs = tiny(), [RunSpec("", "", "validation", "adamw", 8, stack=stack) for stack in stacks]
    found = steptime.measure_round(task, task.data(None), specs[0], specs[2:], seed=0, block=4)
    seconds = found.evaluation

    assert seconds[1:4] == [seconds[0]] * 3
    assert seconds[4] != seconds[0]
    assert steptime.acts_in_evaluation([("TestTimeAugmentation", {})])
