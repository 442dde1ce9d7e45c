"""`__FUNCTION__` against slow and obvious references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.__SNAKE__ import __FUNCTION__


def test_the_lazy_name_is_the_function() -> None:
    assert cf.__FUNCTION__ is __FUNCTION__


@given(weight=st.floats(0.0, 10.0), seed=st.integers(0, 2**31))
def test_the_penalty_is_the_negative_entropy(weight: float, seed: int) -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    penalties = [sum(q * math.log(q) for q in row.softmax(0).tolist()) for row in logits]

    changed = __FUNCTION__(torch.tensor(1.0, dtype=torch.float64), logits, weight)

    assert changed.item() == pytest.approx(1 + weight * sum(penalties) / 4)


def test_the_dtype_of_the_loss_stays() -> None:
    assert __FUNCTION__(torch.tensor(1.0), torch.zeros(4, 2, dtype=torch.bfloat16)).dtype is torch.float32


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`weight` must not be negative, got -1.0"):
        __FUNCTION__(torch.tensor(1.0), torch.zeros(4, 2), weight=-1.0)
