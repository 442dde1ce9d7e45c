import math

import numpy as np
import pytest

from composer.loggers._numbers import as_number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.array([2.5]), 2.5),
        (np.array(7), 7.0),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (None, None),
        ("3", None),
        (1j, None),
        (np.zeros(2), None),
    ],
)
def test_numbers_are_told_from_what_is_none(value, number):
    assert as_number(value) == number
