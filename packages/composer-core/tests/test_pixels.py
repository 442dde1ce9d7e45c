import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from composer.loggers._pixels import in_unit_range


@given(nps.arrays(np.float32, nps.array_shapes(max_dims=3), elements=st.floats(width=32)))
def test_it_is_finite_and_in_range(image):
    with np.errstate(all="ignore"):
        shown = in_unit_range(image)
    assert shown.shape == image.shape
    assert 0 <= shown.min() <= shown.max() <= 1


def test_what_is_in_range_stays_and_what_is_not_is_scaled():
    inside = np.array([[0.25, 0.5]])
    assert np.array_equal(in_unit_range(inside), inside)
    assert in_unit_range(np.array([-2.0, 0.0, 2.0])).tolist() == [0.0, 0.5, 1.0]
    assert in_unit_range(np.array([7.0, 7.0])).tolist() == [0.0, 0.0]
    assert in_unit_range(np.array([-1.0, np.nan, np.inf, -np.inf, 1.0])).tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_bytes_and_booleans_stay(dtype):
    image = np.array([[0, 1]], dtype=dtype)
    assert in_unit_range(image) is image


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint16])
def test_integers_are_bytes(dtype):
    shown = in_unit_range(np.array([[0, 1, 255, 300]], dtype=dtype))
    assert shown.dtype == np.uint8
    assert shown.tolist() == [[0, 1, 255, 255]]
