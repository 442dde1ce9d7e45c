"""`__FUNCTION__` against slow and obvious references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.__SNAKE__ import __FUNCTION__


def test_the_lazy_name_is_the_function() -> None:
    assert cf.__FUNCTION__ is __FUNCTION__


def test_about_the_given_share_of_examples_is_replaced() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(10_000)

    _, replaced = __FUNCTION__(target, target, probability=0.3, generator=generator)

    assert (replaced != target).double().mean().item() == pytest.approx(0.3, abs=0.02)


@given(probability=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_each_example_is_one_of_the_batch_with_its_own_target(probability: float, seed: int) -> None:
    input, target = torch.arange(12).reshape(4, 3), torch.arange(4)
    before = input.clone()

    replaced, labels = __FUNCTION__(input, target, probability, generator=torch.Generator().manual_seed(seed))

    assert replaced.tolist() == [[3 * label, 3 * label + 1, 3 * label + 2] for label in labels.tolist()]
    assert torch.equal(input, before)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_a_probability_outside_0_and_1_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=r"`probability` must be in \[0, 1\]"):
        __FUNCTION__(torch.zeros(2, 3), torch.zeros(2), probability)
