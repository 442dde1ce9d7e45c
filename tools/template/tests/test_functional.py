"""The function, against slow and obvious references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.__SNAKE__ import __SNAKE___batch


def test_the_lazy_name_is_the_function() -> None:
    assert cf.__SNAKE___batch is __SNAKE___batch


def test_the_noise_has_the_strength_as_its_standard_deviation_and_no_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    input = torch.zeros(100, 1000, dtype=torch.float64)

    noise = __SNAKE___batch(input, strength=0.5, generator=generator)

    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.01)


@given(strength=st.floats(0.0, 10.0), seed=st.integers(0, 2**31))
def test_every_element_gets_its_own_draw(strength: float, seed: int) -> None:
    input = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    before = input.clone()
    e = torch.empty(3, 4, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(seed))

    noisy = __SNAKE___batch(input, strength, generator=torch.Generator().manual_seed(seed))

    expected = [[input[i, j].item() + strength * e[i, j].item() for j in range(4)] for i in range(3)]
    assert noisy.tolist() == expected
    assert torch.equal(input, before)


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`strength` must not be negative, got -1.0"):
        __SNAKE___batch(torch.zeros(2, 3), strength=-1.0)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`input` must be floating, got torch.int64"):
        __SNAKE___batch(torch.arange(3))
