"""`apply_hyperball` and `matrix_norms` on single weights."""

from __future__ import annotations

import pytest
import torch

from composer.algorithms.hyperball import apply_hyperball, matrix_norms


def test_a_step_is_the_formula() -> None:
    torch.manual_seed(0)
    before = [torch.randn(3, 5, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)]
    weights = [each - 0.01 * torch.randn_like(each) for each in before]
    expected = []
    for weight, old in zip(weights, before, strict=True):
        radius, update = 2 * old.norm(), old - weight
        moved = old - 0.3 * radius * update / update.norm()
        expected.append(radius * moved / moved.norm())

    apply_hyperball(weights, before, [2 * norm for norm in matrix_norms(before)], [0.3, torch.tensor(0.3)])
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_weight_that_did_not_move_stays_bit_for_bit(lr: float | torch.Tensor) -> None:
    before = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    weight = before.clone()
    apply_hyperball([weight], [before], [torch.tensor(99.0)], lr)
    assert torch.equal(before, weight)

    zero = torch.zeros(4, 4)
    apply_hyperball([zero], [zero.clone()], [torch.tensor(0.0)], lr)
    assert torch.equal(torch.zeros(4, 4), zero)


def test_an_update_too_small_for_a_norm_moves_nothing() -> None:
    before = torch.full((2, 2), 1e-20)
    weight = before - 1e-26
    apply_hyperball([weight], [before], [torch.tensor(1.0)], 0.1)

    assert torch.equal(before, weight)


def test_an_update_that_is_not_finite_is_not_hidden() -> None:
    weight = torch.tensor([[1.0, float("nan")]])
    apply_hyperball([weight], [torch.ones(1, 2)], [torch.tensor(1.0)], 0.1)

    assert weight.isnan().all()


def test_norms_of_bfloat16_weights_are_exact_and_kept() -> None:
    torch.manual_seed(0)
    before = torch.randn(64, 64).bfloat16()
    (radius,) = matrix_norms([before])
    assert torch.float32 == radius.dtype
    torch.testing.assert_close(radius, before.float().norm())

    weight = before.clone()
    for _ in range(20):
        before = weight.clone()
        weight -= 0.05 * torch.randn(64, 64).bfloat16()
        apply_hyperball([weight], [before], [radius], 0.02)
    assert torch.bfloat16 == weight.dtype
    torch.testing.assert_close(weight.float().norm(), radius, rtol=5e-4, atol=0)


def test_sequences_must_have_the_same_lengths() -> None:
    weight = torch.ones(2, 2)
    with pytest.raises(ValueError, match="must have the same lengths, got 1, 1, 1 and 2"):
        apply_hyperball([weight], [weight], [torch.tensor(2.0)], [0.1, 0.1])
