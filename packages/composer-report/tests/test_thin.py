from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.report._charts import curve_of, smoothed

_floats = st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf])


@settings(max_examples=60)
@given(st.lists(_floats, min_size=1, max_size=300), st.integers(1, 40))
def test_thinning_hides_no_extreme_and_counts_what_is_bad(values: list[float], points: int) -> None:
    array = np.array(values)
    steps = np.arange(len(values)) * 3
    curve = curve_of(steps, steps / 2, array, points)
    finite = array[np.isfinite(array)]

    assert len(curve.steps) == len(curve.seconds) == len(curve.values) <= max(2 * points, points)
    assert (curve.num_bad, curve.total) == (len(values) - len(finite), len(values))
    assert np.isin(curve.bad_steps, steps[~np.isfinite(array)]).all()
    assert not np.isinf(curve.values).any()
    assert (np.diff(curve.steps) > 0).all()
    if len(finite) == 0:
        assert np.isnan(curve.values).all()
    elif curve.low is not None and curve.high is not None:
        assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (finite.min(), finite.max())
        with np.errstate(invalid="ignore"):
            assert (np.isnan(curve.low) | (curve.low <= curve.high)).all()
    else:
        np.testing.assert_array_equal(np.where(np.isfinite(array), array, np.nan), curve.values)


@settings(max_examples=30)
@given(st.lists(_floats, min_size=1, max_size=200))
def test_the_smooth_line_is_the_mean_of_the_neighbours(values: list[float]) -> None:
    array = np.array(values)
    half = max(2, round(len(values) * 0.02))
    expected = []
    for i, value in enumerate(values):
        near = array[max(0, i - half) : i + half + 1]
        expected.append(near[np.isfinite(near)].mean() if np.isfinite(value) else np.nan)

    np.testing.assert_allclose(smoothed(array), expected, rtol=1e-6, atol=1e-3)


def test_a_million_values_keep_a_spike_of_one() -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[123_456] = 1000.0
    curve = curve_of(np.arange(1_000_000), np.arange(1_000_000) / 10, values, 700)

    assert len(curve.values) == 700
    assert curve.high is not None
    assert curve.high.max() == 1000.0
    assert abs(curve.values).max() < 1  # the line is smooth


@pytest.mark.parametrize(("noise", "smooth"), [(0.0, False), (1.0, True)])
def test_only_noisy_curves_are_smoothed(noise: float, smooth: bool) -> None:
    values = np.linspace(3, 1, 200) + noise * np.random.default_rng(0).normal(size=200)
    curve = curve_of(np.arange(200), np.arange(200.0), values, 700)

    assert (curve.smooth is not None) == smooth
