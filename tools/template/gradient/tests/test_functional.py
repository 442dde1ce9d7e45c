"""`__FUNCTION__` against slow and obvious references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.__SNAKE__ import __FUNCTION__


def with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a parameter that has this gradient."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def test_the_lazy_name_is_the_function() -> None:
    assert cf.__FUNCTION__ is __FUNCTION__


@given(strength=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_each_output_loses_its_share_of_the_mean(strength: float, seed: int) -> None:
    gradient = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([row - strength * row.mean() for row in gradient])
    parameter = with_gradient(gradient)

    __FUNCTION__([parameter], strength)

    torch.testing.assert_close(parameter.grad, expected)


def test_vectors_and_parameters_without_gradient_stay() -> None:
    bias, unused = with_gradient(torch.tensor([1.0, 3.0])), torch.nn.Parameter(torch.zeros(2, 2))

    __FUNCTION__([bias, unused])

    assert bias.grad is not None
    assert bias.grad.tolist() == [1.0, 3.0]
    assert unused.grad is None


def test_a_strength_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`strength` must be in \[0, 1\], got 1.5"):
        __FUNCTION__([], strength=1.5)
