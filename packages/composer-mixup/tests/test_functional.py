"""`mixup_batch` against a loop over examples, and the distribution it draws from."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.mixup import mixup_batch
from composer.algorithms.mixup.mixup import _gen_mixing_coef


def slow_mixup(input: torch.Tensor, mixing: float, indices: torch.Tensor) -> torch.Tensor:
    rows = [(1 - mixing) * input[i] + mixing * input[int(indices[i])] for i in range(len(input))]
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (6, 5), (6,), (1, 3), (0, 2)])
@pytest.mark.parametrize("mixing", [0.0, 0.3, 0.5, 1.0])
def test_every_example_is_mixed_with_its_partner(shape: tuple[int, ...], mixing: float) -> None:
    input = torch.randn(shape, dtype=torch.float64)
    target, indices = torch.arange(shape[0]), torch.randperm(shape[0])
    mixed, partner, used = mixup_batch(input, target, mixing=mixing, indices=indices)

    expected = slow_mixup(input, mixing, indices) if shape[0] else input
    torch.testing.assert_close(expected, mixed)
    assert torch.equal(target[indices], partner)
    assert mixing == used


@given(n=st.integers(1, 20), alpha=st.floats(0, 5), seed=st.integers(0, 1000))
def test_drawn_partners_are_a_permutation_and_the_example_keeps_the_larger_weight(
    n: int, alpha: float, seed: int
) -> None:
    torch.manual_seed(seed)
    target = torch.arange(n)
    _, partner, mixing = mixup_batch(torch.zeros(n, 2), target, alpha=alpha)

    assert torch.equal(target, partner.sort().values)
    assert 0 <= mixing <= 0.5


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_weight_follows_a_folded_beta_distribution(alpha: float) -> None:
    torch.manual_seed(3)
    draws = torch.tensor([_gen_mixing_coef(alpha) for _ in range(20_000)], dtype=torch.float64)

    # Unfolded, Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)); folding keeps the distance to 1/2.
    # 20,000 draws: the standard error of E[(x - 1/2)^2] is below 0.25 / sqrt(20000) = 0.0018; 5 sigma are allowed.
    expected = 1 / (4 * (2 * alpha + 1))
    assert math.isclose(expected, float((draws - 0.5).square().mean()), abs_tol=0.009)


def test_alpha_zero_mixes_nothing() -> None:
    input = torch.randn(4, 3)
    mixed, _, mixing = mixup_batch(input, torch.arange(4), alpha=0)

    assert mixing == 0.0
    assert torch.equal(input, mixed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_dtypes_are_kept(dtype: torch.dtype) -> None:
    assert dtype is mixup_batch(torch.ones(2, 3, dtype=dtype), torch.arange(2))[0].dtype


def test_integers_become_floats() -> None:
    input = torch.tensor([[0], [10]], dtype=torch.uint8)
    mixed, _, _ = mixup_batch(input, torch.arange(2), mixing=0.25, indices=torch.tensor([1, 0]))

    torch.testing.assert_close(torch.tensor([[2.5], [7.5]]), mixed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_the_memory_format_is_kept(dtype: torch.dtype) -> None:
    x = torch.arange(120).reshape(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last)
    mixed = mixup_batch(x, torch.arange(2), mixing=1.0, indices=torch.tensor([1, 0]))[0]

    assert torch.equal(x.flip(0).to(mixed.dtype), mixed)
    assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_the_inputs_are_not_modified_and_not_aliased() -> None:
    input, target = torch.randn(4, 3), torch.arange(4)
    before = input.clone()
    for mixing in (0.0, 0.3):
        mixed, _, _ = mixup_batch(input, target, mixing=mixing, indices=torch.arange(4))
        mixed.fill_(9)

    assert torch.equal(before, input)


def test_gradients_flow_to_both_partners() -> None:
    input = torch.randn(2, 3, requires_grad=True)
    mixed, _, _ = mixup_batch(input, torch.arange(2), mixing=0.25, indices=torch.tensor([1, 0]))
    mixed[0].sum().backward()

    torch.testing.assert_close(torch.tensor([[0.75] * 3, [0.25] * 3]), input.grad)


def test_a_custom_generator_determines_the_partners() -> None:
    x, y = torch.zeros(16, 1), torch.arange(16)
    first, second = (mixup_batch(x, y, generator=torch.Generator().manual_seed(5))[1] for _ in range(2))

    assert torch.equal(first, second)


def test_it_is_a_function_of_composer() -> None:
    assert cf.mixup_batch is mixup_batch


@pytest.mark.parametrize("mixing", [-0.1, 1.1])
def test_a_weight_outside_0_and_1_is_refused(mixing: float) -> None:
    with pytest.raises(ValueError, match=r"`mixing` must be in \[0, 1\], got"):
        mixup_batch(torch.zeros(2, 1), torch.arange(2), mixing=mixing)


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(ValueError, match="`alpha` must not be negative or infinite, got -1"):
        mixup_batch(torch.zeros(2, 1), torch.arange(2), alpha=-1)


def test_targets_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="`target` must have the same number of rows as `input`, 2, got 3"):
        mixup_batch(torch.zeros(2, 1), torch.arange(3))


@pytest.mark.parametrize("alpha", [np.float32(0.2), np.int64(1), Fraction(1, 5)])
def test_any_real_number_is_an_alpha(alpha: Any) -> None:
    mixed, _, mixing = mixup_batch(torch.rand(4, 3), torch.arange(4), alpha=alpha)

    assert 0 <= mixing <= 0.5
    assert mixed.shape == (4, 3)
