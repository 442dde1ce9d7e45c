"""Checks of numbers with bounds, and the messages that name the allowed values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from composer.utils import check_finite, check_integers, int_at_least


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (1.5, {"least": 0, "most": 1}, r"`x` must be in \[0, 1\], got 1.5. Advice.$"),
        (-1, {"least": 0, "most": 1}, r"`x` must be in \[0, 1\], got -1. Advice.$"),
        (0, {"above": 0, "most": 1}, r"`x` must be in \(0, 1\], got 0. Advice.$"),
        (0, {"above": 0}, "`x` must be positive, got 0. Advice.$"),
        (2, {"most": 1}, "`x` must be at most 1, got 2. Advice.$"),
        (2, {"above": 3}, "`x` must be above 3, got 2. Advice.$"),
        (-0.5, {"least": 0}, "`x` must not be negative, got -0.5. Advice.$"),
        (np.float64(0.5), {"least": 1}, "`x` must be at least 1, got .*0.5.*. Advice.$"),
        (torch.tensor(0.0), {"above": 0}, "`x` must be positive, got tensor"),
        (math.inf, {"above": 0}, "`x` must be finite, got inf"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_allowed_values(
    value: Any, bounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_finite("Advice.", x=value, **bounds)


def test_numbers_within_bounds_are_accepted() -> None:
    check_finite(least=0, most=1, a=0, b=1, c=0.5, d=torch.tensor(0.5), e=np.float32(1))
    check_finite(above=0, most=1, a=1, b=1e-300)
    check_integers(least=1, a=1, b=np.int64(10**12), c=torch.tensor(3))


def test_each_of_several_numbers_is_checked() -> None:
    with pytest.raises(ValueError, match=r"`second` must be at least 1, got 0.$"):
        check_finite(first=1, second=0, least=1)
    with pytest.raises(TypeError, match="`second` must be a number, got True"):
        check_finite(first=1, second=True, least=1)


def test_integers_are_checked_for_their_type_and_their_bound() -> None:
    with pytest.raises(TypeError, match=r"`n` must be an integer, got 2.0"):
        check_integers(n=2.0, least=1)
    with pytest.raises(TypeError, match=r"`n` must be an integer, got 0.5"):  # also below the bound
        check_integers(n=0.5, least=1)
    with pytest.raises(ValueError, match=r"`n` must be at least 1, got 0. Use 8.$"):
        check_integers("Use 8.", n=0, least=1)
    with pytest.raises(ValueError, match=r"`n` must not be negative, got -1.$"):
        check_integers(n=-1, least=0)


@pytest.mark.parametrize("value", [1.0, True, None, "1", torch.tensor(1.0)])
def test_a_value_that_is_not_an_integer_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`n` must be an integer of at least 1 batch, got .* Use 10.$"):
        int_at_least("n", value, 1, "batch", "Use 10.")


@pytest.mark.parametrize("value", [0, -3])
def test_an_integer_that_is_too_small_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"`n` must be at least 1 batch, got {value}. Use 10.$"):
        int_at_least("n", value, 1, "batch", "Use 10.")


@pytest.mark.parametrize("value", [1, np.int32(1), torch.tensor(1)])
def test_an_integer_of_any_library_becomes_a_plain_one(value: Any) -> None:
    assert type(int_at_least("n", value, 1)) is int
